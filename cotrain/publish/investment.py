"""Whether a round of drafter training pays: the seconds that it takes of the run, against those that it is expected to return.

A round is expected to gain what a line through the gains of earlier rounds gives for the acceptance length before it, as where each
round goes the same share of the way to a limit. A gain is the change of the candidate's lead over the serving drafter on the same
rollouts, so that what these have in common cancels. What the moving policy takes is what serving drafters lose from step to step.
`python -m benchmarks.training_pays` compares the rule with training always, never, and not speculating, in runs drawn at random.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt

ROUNDS = (1, 2, 4, 8, 16, 32, 64, 128)  # lengths of the plans that are compared
FIRST_GAIN, LIMIT, PRIOR = 0.15, 2.8, 0.05
"""Share of the way to the limit that a round goes, the limit, and how many measured rounds they weigh as much as."""
FORGET = 0.97  # weight of a round's gain relative to that of the round after it
KEEP = 0.99  # the same for what a step's drift took
MOST_GAINS = 100  # rounds remembered
DRIFT_PRIOR = 1.0  # steps at one accepted draft token without drift, before the first step
OPTIMISM = 0.5  # standard errors that gains are taken to be above their mean, because a rule that has stopped learns nothing more
FIRST_ROUNDS = 2  # rounds before a step without one is measured, to know what rounds cost
CAP = 0.015  # most that may be invested and not returned, as a share of the run


@dataclass(frozen=True)
class Spent:
    """Seconds of a run, as measured."""

    last: float = 0.0  # that a round has added to the last step
    round: float | None = None  # that a round adds, in the mean; None until steps with and without one were measured
    rounds: int = 0  # that were measured
    step: float = 0.0  # of a whole step, in the mean
    elapsed: float = 0.0  # of the run so far


@dataclass(frozen=True)
class Prices:
    """What a decision compares, in seconds."""

    generation: Callable[[float], float]  # of a step's generation at an acceptance length, as far as it is waited for
    swap: float
    spent: Spent


@dataclass(frozen=True)
class Verdict:
    """Whether to train a round now, and why. All numbers are seconds."""

    trains: bool
    reason: str
    returned: float  # by which generation of the last step was shorter than it would have been with the first drafter
    costs: float | None  # what a round adds to the run; None while it is unknown
    saves: float | None = None  # what a round of the best plan would save in generation, swaps subtracted


@dataclass
class Investment:
    """What rounds have cost and brought so far. Saved in checkpoints."""

    gains: list[tuple[float, float]] = field(default_factory=list)  # length before a round, and what the round gained
    lost: float = 0.0  # acceptance length that serving drafters have lost from step to step
    exposed: float = 0.0  # draft tokens accepted a step, summed over steps: what drift could take from
    served: float = 0.0  # acceptance length of the serving drafter
    candidate: float | None = None
    lead: float = 0.0  # of the candidate over the serving drafter, before what has been trained since
    ahead: float = 0.0  # length that the serving drafter has more than the first one would have by now
    invested: float = 0.0  # seconds, less what they have returned

    def observe(self, served: float, candidate: float | None, rounds: float) -> None:
        """Note what both drafters reach on a step's rollouts.

        candidate: None if there is none to compare. rounds: trained since the last call.
        """
        if self.candidate is not None:
            self.lost = KEEP * self.lost + self.served - served
            self.exposed = KEEP * self.exposed + self.served - 1
        if candidate is not None:
            if self.candidate is not None and rounds:
                gain = (candidate - served - self.lead) / rounds
                self.gains = [*self.gains[1 - MOST_GAINS :], (self.candidate, gain)]
            self.lead = candidate - served
        self.served, self.candidate = served, served + self.lead

    def published(self) -> None:
        """The candidate serves from now on."""
        self.ahead += self.lead
        self.served, self.lead = self.served + self.lead, 0.0

    def decide(self, prices: Prices, left: int) -> Verdict:
        """Decide on a round before the next of the steps that are left."""
        drift, spent = self.drift, prices.spent
        now = prices.generation(self.served)
        returned = prices.generation(max(1.0, self.served - self.ahead)) - now
        self.invested += spent.last - returned
        self.ahead *= 1 - drift
        if spent.round is None:
            return Verdict(spent.rounds < FIRST_ROUNDS, "until a step without a round is measured", returned, None)
        if left < 2:  # what is trained now would serve in the step after the next
            return Verdict(False, "the run ends before another round could be served", returned, spent.round)
        line, plans = self._line(), {*(n for n in ROUNDS if n < left), left}
        never = self._seconds(prices, left, 0, line)
        saves = max((never - self._seconds(prices, left, n, line)) / n for n in plans)
        invested, most = self.invested + spent.round, CAP * (spent.elapsed + left * spent.step)
        reason = f"a round costs {spent.round:.2g} s and would save {saves:.2g} s"
        if saves > spent.round and invested > most:
            reason += f", but then {invested:.2g} s were invested and not returned, of {most:.2g} s at most"
        return Verdict(saves > spent.round and invested <= most, reason, returned, spent.round, saves)

    @property
    def drift(self) -> float:
        """Share of the accepted draft tokens that a step of the policy takes away."""
        return min(max(self.lost / (self.exposed + DRIFT_PRIOR), 0.0), 0.5)

    def _line(self) -> tuple[float, float]:
        """Return slope and value at 0 of the gain over the length before a round, by weighted least squares."""
        points = [(1.0, FIRST_GAIN * (LIMIT - 1), PRIOR), (LIMIT, 0.0, PRIOR)]
        points += [(x, gain, FORGET**age) for age, (x, gain) in enumerate(reversed(self.gains))]
        total = sum(w for _, _, w in points)
        x_mean, y_mean = (sum(w * p[i] for *p, w in points) / total for i in (0, 1))
        spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
        slope = sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread
        slope = min(max(slope, -0.9), -0.003)  # a round that brings more the better the drafter is would never end
        variance = sum(w * (y - y_mean - slope * (x - x_mean)) ** 2 for x, y, w in points) / total
        number = total**2 / sum(w * w for _, _, w in points)
        return slope, y_mean - slope * x_mean + OPTIMISM * sqrt(variance / number)

    def _seconds(self, prices: Prices, left: int, rounds: int, line: tuple[float, float]) -> float:
        """Return the seconds of generation and swaps in the steps left, with rounds before the first of them."""
        (slope, at_0), kept = line, 1 - self.drift
        served, candidate, seconds, since = self.served, self.served + self.lead, 0.0, 0
        for i in range(left):
            if i < rounds:
                candidate = max(1.0, candidate + slope * candidate + at_0)
            served, candidate = 1 + (served - 1) * kept, 1 + (candidate - 1) * kept
            now = prices.generation(served)
            seconds += now
            since += 1
            if i < rounds and swap_pays(now - prices.generation(candidate), since, left - i - 1, prices.swap):
                served, seconds, since = candidate, seconds + prices.swap, 0
        return seconds


def swap_pays(saved: float, since: int, left: int, swap: float) -> bool:
    """Whether a swap pays that saves these seconds a step: until now each publication has served `since` steps."""
    return saved * min(since, left) > swap
