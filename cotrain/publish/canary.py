"""The canary: does a published drafter keep, when it is served, what the gate promised?

In each of the first steps after a publication the verification steps counted so far are compared with what was expected
of the drafter, at the draft lengths of these very steps.
Look i spends alpha / 2^i of the error, so that any number of looks together are wrong with probability alpha at most,
however much they depend on each other, and the first ones, which matter most, have the most of it. Versions are numbers
here: weights are kept and sent by whoever asks.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan, sqrt
from typing import Any, Literal

from scipy.special import stdtrit

from cotrain.config.gate import GateConfig
from cotrain.publish.expected import ExpectedAcceptance
from cotrain.records import SpeculationCounts
from cotrain.rollout.acceptance_stats import total_counts


@dataclass(frozen=True, slots=True)
class CanaryDecision:
    """What one step said about the served version. Numbers are NaN when it was not looked at."""

    verdict: Literal["not watching", "no look", "watching", "kept", "roll back"]
    reason: str
    version: int
    roll_back_to: int | None = None
    """The last good version; set when the verdict is "roll back"."""
    served_length: float = nan
    """Over all steps since the publication."""
    promised_length: float = nan
    """At the draft lengths that were served."""
    bound: float = nan
    """Rolled back when the served length is below it."""
    num_drafts: int = 0
    look: int = 0

    def metrics(self) -> dict[str, float]:
        """Every finite number, as canary/<name>."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        return {f"canary/{name}": float(value) for name, value in numbers.items() if isfinite(value)}


class Canary:
    """Watches one publication at a time, and knows the last version that was served as promised."""

    def __init__(self, config: GateConfig, version: int):
        """version is served now and counts as good."""
        self._config = config
        self.serving = self.last_good = version
        self._promise: ExpectedAcceptance | None = None
        self._counts: SpeculationCounts | None = None
        self._num_prompts = self._look = 0
        self._start(None)

    @property
    def watching(self) -> bool:
        """Is the served version still on probation?"""
        return self._promise is not None

    def published(self, version: int, promise: ExpectedAcceptance | None) -> None:
        """The engines serve a new version from the next step on; without a promise it counts as good, unwatched.

        The version before is good when at least one look has found nothing against it. Raises ValueError when
        versions do not go up.
        """
        if version <= self.serving:
            raise ValueError(f"version {version} was published after version {self.serving}; versions only go up")
        if promise is None:
            self.last_good = version
        else:
            if self._promise is None or self._look > 0:
                self.last_good = self.serving
        self.serving = version
        self._start(promise)

    def rolled_back(self, version: int) -> None:
        """The engines serve the weights of the last good version, under a version number of their own."""
        if version <= self.serving:
            raise ValueError(f"version {version} was published after version {self.serving}; versions only go up")
        self.serving = self.last_good = version
        self._start(None)

    def observe(self, counts: SpeculationCounts | None, num_prompts: int) -> CanaryDecision:
        """Counts of one step that was generated with the served version, on num_prompts prompts.

        Counts of rollouts that were drafted throughout: see Rollout.drafted_throughout. Each prompt has at least as many
        samples as each held-out prompt behind the promise had. A step without verification steps is no look: it proves
        nothing. Raises ValueError for counts that no engine can have, or of more draft positions than the promise.
        """
        if self._promise is None:
            return CanaryDecision("not watching", "no publication is on probation", self.serving)
        if counts is None or not counts.num_drafts:
            return CanaryDecision("no look", "nothing was drafted in this step", self.serving)
        _check_counts(counts, self._promise.draft_tokens, num_prompts)
        self._counts = total_counts([self._counts, counts])
        self._num_prompts += num_prompts
        self._look += 1
        assert self._counts is not None
        return self._judge(self._promise, self._counts)

    def state(self) -> dict[str, Any]:
        """Everything an exact continuation needs, as plain numbers."""
        promise = None if self._promise is None else asdict(self._promise)
        counts = None if self._counts is None else asdict(self._counts)
        seen = [self._num_prompts, self._look]
        versions = {"serving": self.serving, "last_good": self.last_good}
        return versions | {"promise": promise, "counts": counts, "seen": seen}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.serving, self.last_good = state["serving"], state["last_good"]
        promise, counts = (
            None if saved is None else {name: tuple(map(_tuples, rows)) for name, rows in saved.items()}
            for saved in (state["promise"], state["counts"])
        )
        self._start(None if promise is None else ExpectedAcceptance(**promise))
        self._counts = None if counts is None else SpeculationCounts(**counts)
        self._num_prompts, self._look = state["seen"]

    def _start(self, promise: ExpectedAcceptance | None) -> None:
        self._promise = promise
        self._counts = None
        self._num_prompts = self._look = 0

    def _judge(self, promise: ExpectedAcceptance, counts: SpeculationCounts) -> CanaryDecision:
        served, promised = counts.acceptance_length, promise.at(counts.steps).value
        alpha = self._config.canary_alpha / 2**self._look
        bound = promised - self._config.canary_tolerance - _noise(promise, counts.steps, self._num_prompts, alpha)
        numbers = (served, promised, bound, counts.num_drafts, self._look)
        found = (
            f"version {self.serving} is served at acceptance length {served:.3f}, promised {promised:.3f}, bound "
            f"{bound:.3f} after {counts.num_drafts} verification steps"
        )
        if served < bound:
            reason = f"{found}: worse than promised; back to version {self.last_good}"
            return CanaryDecision("roll back", reason, self.serving, self.last_good, *numbers)
        if self._look < self._config.canary_steps:
            return CanaryDecision("watching", f"{found}: watched on", self.serving, None, *numbers)
        decision = CanaryDecision("kept", f"{found}: kept", self.serving, None, *numbers)
        self.last_good = self.serving
        self._start(None)
        return decision


def _noise(promise: ExpectedAcceptance, steps: Sequence[int], num_prompts: int, alpha: float) -> float:
    """How far chance takes served below promised, with probability alpha (Satterthwaite's t).

    Two parts: what varies between prompts, in the promise and in the served ones, from the promise's own standard
    error; and the chance of each acceptance, as large as the promised rates make it. With P(A >= k) = r_k accepted
    draft tokens A have E[A^2] = sum (2k - 1) r_k.
    """
    length, rates = promise.at(steps), promise.rates_at(steps)
    between = length.standard_error**2 * (1 + length.num_groups / num_prompts)
    mean = sum(rates)
    within = (sum((2 * k - 1) * rate for k, rate in enumerate(rates, start=1)) - mean**2) / sum(steps)
    variance = between + max(within, 0.0)
    if not variance:
        return 0.0
    freedom = (length.num_groups - 1) * (variance / between) ** 2 if between else 1e9
    return float(stdtrit(min(freedom, 1e9), 1 - alpha)) * sqrt(variance)


def _check_counts(counts: SpeculationCounts, most: int, num_prompts: int) -> None:
    if num_prompts < 1:
        raise ValueError(f"num_prompts is {num_prompts}; give the number of prompts that were generated for")
    if any(counts.steps[most:]):
        raise ValueError(
            f"{sum(counts.steps[most:])} verification steps had more than the {most} draft tokens that the promise is "
            "for; score candidates at the longest draft length served"
        )
    for length, (steps, accepted) in enumerate(zip(counts.steps, counts.accepted, strict=True), start=1):
        falling = [steps, *accepted, 0]
        if falling != sorted(falling, reverse=True) or any(accepted[length:]):
            raise ValueError(f"accepted is {list(accepted)} in {steps} verification steps of {length} draft tokens")


def _tuples(saved: Any) -> Any:
    """JSON has no tuples and saves them as lists; this turns a list back."""
    return tuple(saved) if isinstance(saved, list | tuple) else saved
