"""A rule that says when a round of drafter training pays, against training always, never, and not speculating, in simulated runs.

    python -m benchmarks.training_pays [--worlds 400] [--seed 0] [--show 5] [--cap 0.015]

A world is drawn at random: how long the run is, what a round, a swap and a draft cost, how well the drafter accepts at the start, how
well it could, how fast it learns, and how fast the moving policy leaves it behind. Seconds are those of a step's generation without
speculation. Every arm lives through the same world. Prints how much slower than the best of the other three the rule is, and the worlds
in which it does worst.
"""

import argparse
import math
import random
from dataclasses import dataclass, field
from statistics import fmean

K = 3  # draft tokens
ROUNDS = (1, 2, 4, 8, 16, 32, 64, 128)  # lengths of the plans that are compared
FIRST_GAIN, LIMIT, PRIOR = (
    0.15,
    2.8,
    0.05,
)  # share of the way to the limit that a round goes, the limit, weight of both in rounds
FORGET = 0.97  # weight of a round's gain relative to that of the round after it
KEEP = 0.99  # the same for what a step's drift took
DRIFT_PRIOR = 1.0  # steps at one accepted draft token without drift, before the first step
OPTIMISM = 0.5  # standard errors that gains are taken to be above their mean, because a rule that has stopped learns nothing more
CAP = 0.015  # most that may be invested and not returned, as a share of the run


@dataclass(frozen=True)
class World:
    """A run. Seconds are relative to a step's generation without speculation."""

    steps: int
    other: float  # seconds of a step besides generation
    draft_cost: float  # of a step of the engine with drafts, relative to one without
    start: float  # acceptance length at the start
    limit: float  # acceptance length after endless training
    half: float  # rounds to half of the way there
    drift: float  # share of the accepted draft tokens that a step of the policy takes away
    round_s: float
    swap_s: float

    @classmethod
    def drawn(cls, rng: random.Random, shortest: int = 50) -> "World":
        def log_uniform(low: float, high: float) -> float:
            return math.exp(rng.uniform(math.log(low), math.log(high)))

        other, limit = rng.uniform(0.1, 1.0), rng.uniform(1.2, 3.4)
        return cls(
            steps=int(log_uniform(shortest, 300)),
            other=other,
            draft_cost=rng.uniform(1.05, 1.6),
            start=1 + rng.random() * (limit - 1),
            limit=limit,
            half=log_uniform(1, 60),
            drift=rng.choice([0.0, log_uniform(0.001, 0.1)]),
            round_s=rng.uniform(0.006, 0.3) * (1 + other),
            swap_s=rng.uniform(0, 0.1),
        )

    def generation(self, length: float) -> float:
        """Seconds of a step's generation at an acceptance length, without drafts where they do not pay."""
        return min(1.0, self.draft_cost / length)


@dataclass
class Rule:
    """Trains while some number of rounds from now on returns more seconds than it takes, by the gains of rounds so far.

    The gain of a round is taken to be a line of the acceptance length before it, as it is where each round goes the same share of
    the way to a limit. It is the change of the candidate's lead over the serving drafter, which are scored on the same rollouts:
    what these have in common cancels. The drift of the policy is what serving drafters lose, from one publication to the next.
    """

    cap: float = CAP
    gains: list[tuple[float, float]] = field(default_factory=list)  # length before a round, and what the round gained
    lost: float = 0.0
    exposed: float = 0.0  # draft tokens accepted, summed over steps: what drift could take from
    served: float = 0.0
    candidate: float | None = None
    lead: float = 0.0  # of the candidate, before what has been trained since
    ahead: float = 0.0  # length that the serving drafter has more than the first one would have by now
    invested: float = 0.0  # seconds, less what they have returned
    elapsed: float = 0.0

    def observe(self, served: float, candidate: float, trained: bool) -> None:
        """Note what both drafters reach on a step's rollouts. trained: whether the candidate has had a round since the last call."""
        if self.candidate is not None:
            gain = candidate - served - self.lead if trained else 0.0
            if trained:
                self.gains.append((self.candidate, gain))
            self.lost = KEEP * self.lost + self.served - served
            self.exposed = KEEP * self.exposed + self.served - 1
        self.served, self.candidate, self.lead = served, candidate, candidate - served

    def publish(self) -> None:
        """The candidate serves from now on."""
        assert self.candidate is not None
        self.ahead += self.candidate - self.served
        self.served, self.lead = self.candidate, 0.0

    def drift(self) -> float:
        return min(max(self.lost / (self.exposed + DRIFT_PRIOR), 0.0), 0.5)

    def line(self) -> tuple[float, float]:
        """Return slope and value at 0 of the gain over the length before a round, by weighted least squares."""
        points = [(1.0, FIRST_GAIN * (LIMIT - 1), PRIOR), (LIMIT, 0.0, PRIOR)]
        points += [(x, gain, FORGET**age) for age, (x, gain) in enumerate(reversed(self.gains[-100:]))]
        total = sum(w for _, _, w in points)
        x_mean, y_mean = (sum(w * p[i] for *p, w in points) / total for i in (0, 1))
        spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
        slope = sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread
        slope = min(max(slope, -0.9), -0.003)  # a round that brings more the better the drafter is would never end
        variance = sum(w * (y - y_mean - slope * (x - x_mean)) ** 2 for x, y, w in points) / total
        number = total**2 / sum(w * w for _, _, w in points)
        return slope, y_mean - slope * x_mean + OPTIMISM * math.sqrt(variance / number)

    def trains(self, world: World, left: int, round_before: float) -> bool:
        """Return whether to train before the next step. left: steps. round_before: seconds of the round before the last step."""
        drift = self.drift()
        now = world.generation(self.served)
        self.invested += round_before - (world.generation(max(1.0, self.served - self.ahead)) - now)
        self.ahead *= 1 - drift
        self.elapsed += now + world.other + round_before
        if self.invested + world.round_s > self.cap * (self.elapsed + left * (now + world.other)):
            return False
        never = self.plan(world, left, 0, drift)
        plans = {rounds for rounds in ROUNDS if rounds < left} | {left}
        return any(self.plan(world, left, rounds, drift) < never for rounds in plans)

    def plan(self, world: World, left: int, rounds: int, drift: float) -> float:
        """Return the seconds of generation, rounds and swaps in the steps left, with rounds before the first of them."""
        slope, at_0 = self.line()
        served, candidate, seconds = self.served, self.candidate or 1.0, 0.0
        for i in range(left):
            if i < rounds:
                seconds += world.round_s
                candidate = max(1.0, min(candidate + slope * candidate + at_0, K + 1.0))
            served, candidate = (1 + (length - 1) * (1 - drift) for length in (served, candidate))
            if i < rounds and swap_pays(world, served, candidate, left - i):
                served, seconds = candidate, seconds + world.swap_s
            seconds += world.generation(served)
        return seconds


def swap_pays(world: World, served: float, candidate: float, left: int) -> bool:
    return (world.generation(served) - world.generation(candidate)) * min(left, 8) > world.swap_s


def seconds_of(world: World, arm: str, rng: random.Random, cap: float = CAP) -> tuple[float, int]:
    """Return the seconds of a run, and the rounds that it trained. arm: none, frozen, always or rule."""
    if arm == "none":
        return world.steps * (1 + world.other), 0
    rule, total, rounds, trained = Rule(cap), 0.0, 0, False
    served = candidate = world.start
    for left in reversed(range(world.steps)):
        total += world.generation(served) + world.other
        # Rollouts differ from step to step, and both drafters meet the same ones.
        common, own = 1 + rng.gauss(0, 0.03), rng.gauss(0, 0.01)
        rule.observe(1 + (served - 1) * common, 1 + (candidate - 1) * common + own, trained)
        if candidate > served and left and swap_pays(world, served, candidate, left):
            served, total = candidate, total + world.swap_s
            rule.publish()
        if arm == "rule":
            trained = bool(left) and rule.trains(world, left, trained * world.round_s)
        else:
            trained = arm == "always" and bool(left)
        if trained:
            rounds, total = rounds + 1, total + world.round_s
            candidate += (1 - 0.5 ** (1 / world.half)) * (world.limit - candidate)
        served, candidate = (1 + (length - 1) * (1 - world.drift) for length in (served, candidate))
    return total, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=400, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--shortest", type=int, default=50, help="steps of a run at least (default %(default)s)")
    parser.add_argument("--show", type=int, default=5, help="worst worlds to print (default %(default)s)")
    parser.add_argument("--cap", type=float, default=CAP, help="on what is invested (default %(default)s)")
    args = parser.parse_args()
    rng, rows = random.Random(args.seed), []
    for number in range(args.worlds):
        world = World.drawn(rng, args.shortest)
        times = {arm: seconds_of(world, arm, random.Random(number))[0] for arm in ("always", "frozen", "none")}
        seconds, rounds = seconds_of(world, "rule", random.Random(number), args.cap)
        best = min(times, key=lambda arm: times[arm])
        rows.append(
            (seconds / times[best] - 1, best, rounds, world, {a: t / times[best] - 1 for a, t in times.items()})
        )
    rows.sort(key=lambda row: -row[0])
    print("seconds more than the best of always, frozen and none:")
    print("| arm | mean | worst | more than 2 % |\n|---|--:|--:|--:|")
    arms = {"rule": [row[0] for row in rows]} | {arm: [row[4][arm] for row in rows] for arm in rows[0][4]}
    for arm, more in arms.items():
        print(f"| {arm} | {fmean(more):+.1%} | {max(more):+.1%} | {fmean(m > 0.02 for m in more):.1%} |")
    for more, best, rounds, world, _ in rows[: args.show]:
        print(f"{more:+.1%} over {best}, {rounds} rounds: {world}")


if __name__ == "__main__":
    main()
