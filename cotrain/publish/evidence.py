"""What one step shows of the drafters, and what is remembered of the one that serves: all that a decision rests on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.records import RolloutBatch, Versions
from cotrain.trainer.trainer import FreshScores

CANARY_STEPS = 4
"""Steps after a publication for which the canary watches it: a broken delivery shows in the first two."""


@dataclass(frozen=True)
class Publication:
    """The drafter that serves, and what the next decision needs to know of those before. Saved in checkpoints."""

    version: int
    last_good: int
    """The last version that was served as expected; what a roll-back goes back to."""
    judged_on: int
    """Policy version of the rollouts on which a candidate was last compared with the serving drafter."""
    judged_update: int = 0
    """Optimizer steps behind the candidate that was last evaluated: each is evaluated once."""
    swap_seconds: float = 0.0
    """Seconds that the last swap took."""
    watched: int = 0
    """Steps for which the canary still watches it."""

    def published(self, version: int, policy_version: int, swap_seconds: float, scored: bool) -> "Publication":
        """A candidate serves. It is watched, and one that could not be scored counts as good.

        The version before is good when at least one step has shown nothing against it.
        """
        before = self.version if self.watched < CANARY_STEPS else self.last_good
        last_good, watched = (before, CANARY_STEPS) if scored else (version, 0)
        return Publication(version, last_good, policy_version, self.judged_update, swap_seconds, watched)

    def rolled_back(self, version: int, swap_seconds: float) -> "Publication":
        """The weights of the last good version serve again, under a version number of their own."""
        return replace(self, version=version, last_good=version, swap_seconds=swap_seconds, watched=0)


@dataclass(frozen=True)
class Evidence:
    """What one step showed, before any drafter was trained on its rollouts."""

    step: int
    batch: RolloutBatch
    """Its rollouts are last segments, with counts of their own: the drafters were scored on these."""
    versions: Versions
    """What the controller believes to be served."""
    serving: Publication
    scores: FreshScores
    """Scores of the serving drafter and the candidate, on the same rollouts of this step."""
    expected: ExpectedAcceptance | None
    """What the serving drafter is expected to reach; None where too few rollouts could be scored."""
    sent: Mapping[str, str] = field(default_factory=dict)
    """Digests of the drafter's tensors as they were sent."""
    served: Sequence[Mapping[str, str]] = ()
    """The same as each engine serves them; empty in steps in which nothing is read back."""
    known: Collection[Versions] = ()
    """What else may have generated rollouts that end now, where some run while weights change."""
