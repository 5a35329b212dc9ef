"""The evidence for a decision on the drafter: what one step shows of the drafters, and the record of the one that serves."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.records import RolloutBatch, Versions
from cotrain.trainer.trainer import FreshScores

CANARY_STEPS = 4
"""Number of steps for which the canary watches a publication; a broken delivery shows in the first two."""


@dataclass(frozen=True)
class Publication:
    """The record of the drafter that serves, with what the next decision must know of earlier ones. Saved in checkpoints."""

    last_good: int
    """The last version that was served as expected; a roll-back returns to it."""
    judged_update: int = 0
    """Optimizer steps behind the candidate that was last judged; each candidate is judged only once."""
    unjudged: int = 0
    """Steps with enough rollouts to judge by, scored or not, since a candidate was last compared with the serving drafter."""
    swap_seconds: float = 0.0
    """Seconds that the last swap took."""
    watched: int = 0
    """Number of further steps for which the canary watches the serving drafter."""

    def published(self, before: int, version: int, swap_seconds: float, scored: bool) -> "Publication":
        """Return the record once a candidate serves. It is watched if it could be scored; otherwise it counts as good.

        `before`, the version that it replaces, counts as good if at least one step has shown nothing against it.
        """
        good = before if self.watched < CANARY_STEPS else self.last_good
        last_good, watched = (good, CANARY_STEPS) if scored else (version, 0)
        return Publication(last_good, self.judged_update, 0, swap_seconds, watched)

    def rolled_back(self, version: int, swap_seconds: float) -> "Publication":
        """Return the record once the weights of the last good version serve again, under a new version number."""
        return replace(self, last_good=version, swap_seconds=swap_seconds, watched=0)


@dataclass(frozen=True)
class Evidence:
    """What one step showed, before any drafter was trained on its rollouts."""

    step: int
    batch: RolloutBatch
    """Each rollout is cut to its last segment, with the counts of that segment: the drafters were scored on these."""
    versions: Versions
    """The versions that the engines should serve."""
    serving: Publication
    scores: FreshScores
    """Scores of the serving drafter and the candidate, on the same rollouts of this step."""
    expected: ExpectedAcceptance | None
    """Expected acceptance of the serving drafter; None if too few rollouts could be scored."""
    sent: Mapping[str, str] = field(default_factory=dict)
    """Digests of the drafter's tensors as they were sent."""
    served: Sequence[Mapping[str, str]] = ()
    """The digests of these tensors in each engine; empty in steps in which nothing is read back."""
    known: Collection[Versions] = ()
    """Other versions that may have generated rollouts of this step, if rollouts continue while weights change."""
