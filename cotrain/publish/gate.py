"""The publish gate: a trained candidate replaces the served drafter only where that is known to pay.

Both drafters are scored on the same rollouts, which neither was trained on, with the longest draft length that may be
served. Each decision is a test of its own: a candidate without any gain is published with a probability of at most 1 -
confidence each time it is judged, so that a run of N judged candidates makes at most (1 - confidence) N such
publications on average. Each of them costs one swap and serves a drafter that is as good as the one before.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan

import numpy as np
from scipy.special import stdtrit
from torch import Tensor

from cotrain.config.gate import GateConfig
from cotrain.publish.expected import ExpectedAcceptance, expected_of, gain_of
from cotrain.records import RolloutBatch
from drafters.acceptance import RolloutAcceptance


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the engines generate, as measured in the last steps."""

    tokens_per_step: float
    """Generated tokens of one step, over all rollouts."""
    seconds_per_verification: float
    """Generation seconds of a step over its verification steps, all rollouts counted; one without draft tokens is one
    too."""
    steps: tuple[int, ...]
    """[K+1] engine steps of single requests, by the draft tokens that they verified: 0 to K."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "seconds_per_verification"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)}; give the finite, positive value of a measured step")

    @property
    def drafts(self) -> bool:
        """Were there draft tokens in most engine steps? If not, nothing can be said of what a drafter saves."""
        return sum(self.steps[1:]) > self.steps[0]

    def seconds_saved(self, length_before: float, length_after: float) -> float:
        """In one step: its tokens take tokens / length verification steps."""
        return self.tokens_per_step * self.seconds_per_verification * (1 / length_before - 1 / length_after)

    def seconds_saved_by(self, candidate: ExpectedAcceptance, serving: ExpectedAcceptance) -> float:
        """Seconds that a step like this one takes less with one drafter than with another, at the same draft lengths.

        NaN where most engine steps verified no draft tokens.
        """
        if not self.drafts:
            return nan
        return self.seconds_saved(self._length(serving), self._length(candidate))

    def _length(self, expected: ExpectedAcceptance) -> float:
        undrafted, *drafted = self.steps
        return (undrafted + sum(drafted) * expected.at(drafted).value) / sum(self.steps)


@dataclass(frozen=True)
class GateDecision:
    """Publish or not, and why. Numbers are NaN where they could not be computed."""

    publish: bool
    reason: str
    margin: float
    swap_seconds: float
    num_rollouts: int
    num_groups: int
    candidate_length: float = nan
    """With the longest draft length that may be served, and so are the other lengths and the gain."""
    serving_length: float = nan
    gain: float = nan
    lower_bound: float = nan
    """The gain is above it, with the gate's confidence."""
    seconds_saved: float = nan
    """Before the next candidate, if the gain is as estimated, at the draft lengths of this step. NaN where most engine
    steps verified no draft tokens."""
    expected: ExpectedAcceptance | None = None
    """Of the candidate, for the canary; None where it could not be judged."""

    def metrics(self) -> dict[str, float]:
        """Every finite number, as gate/<name>."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        return {f"gate/{name}": float(value) for name, value in numbers.items() if isfinite(value)}


def decide(
    candidate: Sequence[RolloutAcceptance],
    serving: Sequence[RolloutAcceptance],
    prompts: Sequence[str],
    pace: Pace,
    lifetime_steps: float,
    swap_seconds: float,
    config: GateConfig,
) -> GateDecision:
    """Compare two drafters on the same R rollouts, row by row.

    candidate, serving [K]: their scores at draft lengths 1 to K. prompts [R] names each rollout's prompt.
    lifetime_steps: steps until the next candidate may replace this one. Acceptances that are not finite refuse the
    candidate, and so do too few rollouts unless config.publish_when is "always". Raises ValueError naming the argument
    when arguments do not fit each other.
    """
    ours, theirs = candidate[-1], serving[-1]
    _check_arguments(ours, theirs, prompts, lifetime_steps, swap_seconds)
    whole = ours.steps.isfinite()
    num_rollouts = int(whole.sum())
    groups = np.unique(np.asarray(prompts)[whole.numpy()], return_inverse=True)[1]
    num_groups = int(groups.max()) + 1 if num_rollouts else 0
    common = (config.margin, swap_seconds, num_rollouts, num_groups)
    if reason := _not_finite(ours, theirs):
        return GateDecision(False, f"refused: {reason}", *common)
    expected, expected_before = expected_of(candidate, prompts), expected_of(serving, prompts)
    reason = _too_little(num_rollouts, num_groups, config)
    if reason or expected is None or expected_before is None:
        if config.publish_when == "always":
            return GateDecision(True, f'published unjudged because publish_when = "always": {reason}', *common)
        return GateDecision(False, f"refused: {reason}", *common)

    gain = gain_of(_rows(ours, whole), _rows(theirs, whole), groups)
    lower_bound = gain.value - float(stdtrit(num_groups - 1, config.confidence)) * gain.standard_error
    saved = lifetime_steps * pace.seconds_saved_by(expected, expected_before)
    publish, reason = _verdict(lower_bound, saved, swap_seconds, config)
    length, length_before = expected.longest.value, expected_before.longest.value
    saves = f"{saved:.2f} s saved before the next candidate" if isfinite(saved) else "next to nothing was drafted"
    return GateDecision(
        publish,
        f"{reason}: acceptance length {length:.3f} against {length_before:.3f} served, gain {gain.value:+.3f}, "
        f"at least {lower_bound:+.3f} ({config.confidence:.0%}, {num_rollouts} rollouts of {num_groups} prompts, "
        f"{len(candidate)} draft tokens), {saves}, {swap_seconds:.2f} s for the swap",
        *common,
        candidate_length=length,
        serving_length=length_before,
        gain=gain.value,
        lower_bound=lower_bound,
        seconds_saved=saved,
        expected=expected,
    )


def pace_of(batch: RolloutBatch) -> Pace | None:
    """Of one step's generation; None when nothing was generated. Each verification step emits what it accepts and 1."""
    counts = batch.speculation
    accepted = sum(counts.accepted_per_position) if counts else 0
    if batch.num_generated_tokens <= accepted:
        return None
    num_steps = batch.num_generated_tokens - accepted
    drafted = counts.steps if counts else ()
    # The first token of a rollout comes from the step that computes its prompt.
    undrafted = max(0, num_steps - sum(drafted) - len(batch.rollouts))
    return Pace(float(batch.num_generated_tokens), batch.seconds / num_steps, (undrafted, *drafted))


def _rows(scored: RolloutAcceptance, rows: Tensor) -> RolloutAcceptance:
    return RolloutAcceptance(scored.steps[rows], scored.accepted[rows], scored.known[rows])


def _verdict(lower_bound: float, saved: float, swap_seconds: float, config: GateConfig) -> tuple[bool, str]:
    if config.publish_when == "always":
        return True, 'published because publish_when = "always"'
    if lower_bound <= config.margin:
        return False, f"kept back, no gain above the margin of {config.margin:g} is certain"
    if saved <= swap_seconds:
        return False, "kept back, the swap would cost more than it saves"
    return True, "published"


def _not_finite(candidate: RolloutAcceptance, serving: RolloutAcceptance) -> str:
    """Whose acceptances are not finite; empty when all are that can be."""
    for name, one, other in (("candidate", candidate, serving), ("served drafter", serving, candidate)):
        if broken := int((one.known < other.known).sum()):
            return f"acceptances of the {name} are not finite on {broken} of {len(one.known)} rollouts"
    return ""


def _too_little(num_rollouts: int, num_groups: int, config: GateConfig) -> str:
    """What is missing for a judgement; empty when it is possible."""
    if num_rollouts < config.min_rollouts:
        return (
            f"{num_rollouts} rollouts were scored, drafter.gate.min_rollouts is {config.min_rollouts}; generate more in "
            "a step, or lower it"
        )
    if num_groups < config.min_prompts:
        return (
            f"the rollouts are of {num_groups} prompts, drafter.gate.min_prompts is {config.min_prompts}; take more "
            "prompts a step, or lower it"
        )
    return ""


def _check_arguments(
    candidate: RolloutAcceptance,
    serving: RolloutAcceptance,
    prompts: Sequence[str],
    lifetime_steps: float,
    swap_seconds: float,
) -> None:
    for name, value in (("lifetime_steps", lifetime_steps), ("swap_seconds", swap_seconds)):
        if not 0 <= value < inf:
            raise ValueError(f"{name} is {value}; it must be finite and not negative")
    if serving.accepted.shape != candidate.accepted.shape:
        raise ValueError(
            f"candidate and serving are of {tuple(candidate.accepted.shape)} and {tuple(serving.accepted.shape)} "
            "(rollouts, draft tokens); score both on the same rollouts with the same draft length"
        )
    if len(prompts) != len(candidate.steps):
        raise ValueError(f"prompts names {len(prompts)} rollouts, candidate has {len(candidate.steps)}")
