"""The evidence for a decision on the drafter: what one step shows of the drafters, and the record of the one that serves."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotrain.config.schema import MIN_PROMPTS, MIN_ROLLOUTS
from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.records import RolloutBatch, Versions
from drafters.scores import RolloutAcceptance

CANARY_STEPS = 4  # number of steps for which the canary watches a publication; a broken delivery shows in the first two


def enough(prompts: Sequence[str]) -> bool:
    """Whether rollouts of these prompts [R] can judge a candidate."""
    return len(prompts) >= MIN_ROLLOUTS and len(set(prompts)) >= MIN_PROMPTS


@dataclass(frozen=True, eq=False)
class FreshScores:
    """Expected acceptance on rollouts, before any drafter was trained on them."""

    prompts: list[str]  # [R] prompt of each rollout
    serving: list[RolloutAcceptance]  # [K] of the serving drafter at draft lengths 1 to K
    candidate: list[RolloutAcceptance] | None  # [K] of the candidate; None if all weights were judged or published
    updates: int  # optimizer steps that led to the candidate
    served_by: list[int]  # [R] drafter version that the last segment of each rollout was drafted with
    steps: int = 1  # steps that the rollouts are of
    gathered: "FreshScores | None" = None
    """The same candidate on these rollouts and those of the steps before; None is these alone. Nothing but the gate reads it."""

    def after(self, earlier: "FreshScores | None") -> "FreshScores":
        """Return these scores and earlier ones together, or these alone if the earlier ones are not of the same candidate."""
        if earlier is None or earlier.updates != self.updates or not (self.candidate and earlier.candidate):
            return self
        pairs = [zip(earlier.serving, self.serving, strict=True), zip(earlier.candidate, self.candidate, strict=True)]
        serving, candidate = ([old.joined(new) for old, new in pair] for pair in pairs)
        prompts, served_by = earlier.prompts + self.prompts, earlier.served_by + self.served_by
        return FreshScores(prompts, serving, candidate, self.updates, served_by, steps=earlier.steps + 1)


@dataclass(frozen=True)
class Publication:
    """The record of the drafter that serves, with what the next decision must know of earlier ones. Saved in checkpoints."""

    last_good: int  # the last version that was served as expected; a roll-back returns to it
    judged_update: int = 0  # optimizer steps behind the candidate that was last judged; each one is judged only once
    unjudged: int = 0  # steps with enough rollouts to judge by, scored or not, since a candidate was last compared
    swap_seconds: float = 0.0  # seconds that the last swap took
    watched: int = 0  # number of further steps for which the canary watches the serving drafter
    served: int = 0  # steps that the serving drafter has served

    def published(self, before: int, version: int, swap_seconds: float, scored: bool) -> "Publication":
        """Return the record once a candidate serves. It is watched if it could be scored; otherwise it counts as good.

        `before`, the version that it replaces, counts as good if at least one step has shown nothing against it.
        """
        good = before if self.watched < CANARY_STEPS else self.last_good
        last_good, watched = (good, CANARY_STEPS) if scored else (version, 0)
        return Publication(last_good, self.judged_update, 0, swap_seconds, watched)

    def rolled_back(self, version: int, swap_seconds: float) -> "Publication":
        """Return the record once the weights of the last good version serve again, under a new version number."""
        return replace(self, last_good=version, swap_seconds=swap_seconds, watched=0, served=0)


@dataclass(frozen=True)
class Evidence:
    """What one step showed, before any drafter was trained on its rollouts."""

    step: int
    batch: RolloutBatch  # each rollout cut to its last segment, with its counts: the drafters were scored on these
    versions: Versions  # the versions that the engines should serve
    serving: Publication
    scores: FreshScores  # of both drafters, on the same rollouts of this step and perhaps of those before
    expected: ExpectedAcceptance | None = None  # of the serving drafter in this step; None if too few were scored
    sent: Mapping[str, str] = field(default_factory=dict)  # digests of the drafter's tensors as they were sent
    served: Sequence[Mapping[str, str]] = ()  # and as each engine has them; empty in steps that read nothing back
    known: Collection[Versions] = ()  # other versions that may have generated rollouts of this step, with lag
