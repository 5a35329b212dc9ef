"""What one step shows of the drafters, and what is remembered of the one that serves: all that a decision rests on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from typing import Self

from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.records import Rollout, RolloutBatch, SpeculationCounts, Versions
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.trainer.trainer import FreshScores

CANARY_STEPS = 4
"""Steps after a publication for which the canary watches it: a broken delivery shows in the first two."""


@dataclass(frozen=True)
class Throughput:
    """How fast the engines generated one step."""

    tokens: float
    """Generated tokens, over all rollouts."""
    seconds_per_verification: float
    """Generation seconds over the verification steps of all rollouts; one without draft tokens counts too."""
    steps: tuple[int, ...]
    """[K+1] engine steps of single requests, by the draft tokens that they verified: 0 to K."""

    @classmethod
    def of(cls, batch: RolloutBatch) -> Self:
        """Each verification step emits what it accepts and one token more."""
        counts = batch.speculation
        drafted = counts.steps if counts else ()
        num_steps = max(1, batch.num_generated_tokens - (sum(counts.accepted_per_position) if counts else 0))
        # The first token of a rollout comes from the step that computes its prompt.
        undrafted = max(0, num_steps - sum(drafted) - len(batch.rollouts))
        return cls(float(batch.num_generated_tokens), batch.seconds / num_steps, (undrafted, *drafted))

    def seconds_saved(self, candidate: ExpectedAcceptance, serving: ExpectedAcceptance) -> float:
        """Seconds that a step like this one takes less with the candidate, at the same draft lengths.

        NaN where most engine steps verified no draft tokens, or more of them than the drafters were scored at.
        """
        undrafted, *drafted = self.steps
        if sum(drafted) <= undrafted or not candidate.covers(drafted):
            return nan
        after, before = (
            (undrafted + sum(drafted) * expected.at(drafted).value) / sum(self.steps)
            for expected in (candidate, serving)
        )
        return self.tokens * self.seconds_per_verification * (1 / before - 1 / after)


@dataclass(frozen=True)
class Publication:
    """The drafter that serves, and what the next decision needs to know of those before. Saved in checkpoints."""

    version: int
    last_good: int
    """The last version that was served as expected; what a roll-back goes back to."""
    judged_on: int
    """Policy version of the rollouts on which a candidate was last compared with the serving drafter."""
    judged_round: int = 0
    """Training rounds behind the candidate that was last evaluated: each is evaluated once."""
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
        return Publication(version, last_good, policy_version, self.judged_round, swap_seconds, watched)

    def rolled_back(self, version: int, swap_seconds: float) -> "Publication":
        """The weights of the last good version serve again, under a version number of their own."""
        return replace(self, version=version, last_good=version, swap_seconds=swap_seconds, watched=0)


@dataclass(frozen=True)
class Delivery:
    """Digests of the drafter's tensors as they were sent, and as each engine serves them."""

    sent: Mapping[str, str]
    served: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Evidence:
    """What one step showed, before any drafter was trained on its rollouts."""

    step: int
    batch: RolloutBatch
    versions: Versions
    """What the controller believes to be served."""
    serving: Publication
    scores: FreshScores
    """Scores of the serving drafter and the candidate, on the same rollouts of this step."""
    expected: ExpectedAcceptance | None
    """What the serving drafter is expected to reach; None where too few rollouts could be scored."""
    delivery: Delivery | None = None
    """None in steps in which nothing is read back."""

    @cached_property
    def judged_rollouts(self) -> list[Rollout]:
        """Those that were drafted throughout: of others it is not known what a drafter should reach."""
        return [rollout for rollout in self.batch.rollouts if rollout.drafted_throughout]

    @cached_property
    def counts(self) -> SpeculationCounts | None:
        """Verification steps of `judged_rollouts`; None without any."""
        counts = total_counts(rollout.speculation for rollout in self.judged_rollouts)
        return counts if counts and counts.num_drafts else None

    @property
    def num_prompts(self) -> int:
        """Prompts of `judged_rollouts`."""
        return len({rollout.prompt_id for rollout in self.judged_rollouts})
