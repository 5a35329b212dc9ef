"""The publish gate: a trained candidate replaces the served drafter only where that is known to pay.

Both drafters are scored on the same held-out rollouts. An acceptance length is a ratio of two sums over rollouts
(accepted draft tokens, verification steps), and rollouts of one prompt resemble each other. Its noise is therefore
that of leaving out one prompt at a time: the delete-one-group jackknife (Efron and Stein, 1981; for ratios
Cochran, Sampling Techniques, 6.17), with Student's t of one degree of freedom less than there are prompts. It needs
no random numbers, and unlike percentiles of a bootstrap it does not become too narrow with few prompts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from cotrain.drafting.gate_config import GateConfig
from cotrain.records import Rollout, RolloutBatch
from drafters.acceptance import RolloutAcceptance

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An acceptance length, or a gain in it, and its noise."""

    value: float
    standard_error: float
    num_groups: int
    """Prompts (or single rollouts) that the standard error comes from."""

    def __post_init__(self) -> None:
        for name in ("value", "standard_error"):
            if not isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; an estimate needs finite acceptances")
        if self.standard_error < 0 or self.num_groups < 2:
            raise ValueError(
                f"standard_error is {self.standard_error} from num_groups = {self.num_groups}; noise is known from two "
                "groups on: score more prompts"
            )


@dataclass(frozen=True, slots=True)
class Promise:
    """What a published drafter is expected to reach when it is served."""

    length: Estimate
    rates: tuple[float, ...]
    """By draft position: share of verification steps that accept it and all before it."""

    def length_at(self, mean_draft_tokens: float) -> float:
        """Least length that keeps the promise when some verification steps had fewer draft tokens.

        Rates fall with the position, so that accepted tokens are a concave function of the draft length. Of all
        mixtures with the same mean, the one of 1 and k draft tokens accepts least.
        """
        most = len(self.rates)
        missing = 0.0 if most == 1 else max(0.0, most - mean_draft_tokens) / (most - 1)
        return self.length.value - missing * sum(self.rates[1:])


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the engines generate, as measured in the last steps."""

    tokens_per_step: float
    """Generated tokens of one step, over all rollouts."""
    seconds_per_verification: float
    """Generation seconds of a step over its verification steps, all rollouts counted; one without draft tokens is one
    too."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "seconds_per_verification"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)}; give the finite, positive value of a measured step")

    def seconds_saved(self, length_before: float, length_after: float) -> float:
        """In one step: its tokens take tokens / length verification steps."""
        return self.tokens_per_step * self.seconds_per_verification * (1 / length_before - 1 / length_after)


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
    serving_length: float = nan
    gain: float = nan
    lower_bound: float = nan
    """The gain is above it, with the gate's confidence."""
    seconds_saved: float = nan
    """Before the next candidate, if the gain is as estimated."""
    promise: Promise | None = None
    """Of the candidate, for the canary; None where it could not be judged."""

    def metrics(self) -> dict[str, float]:
        """Every finite number, as gate/<name>."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        return {f"gate/{name}": float(value) for name, value in numbers.items() if isfinite(value)}


def decide(
    candidate: RolloutAcceptance,
    serving: RolloutAcceptance | None,
    prompts: Sequence[str] | None,
    pace: Pace,
    lifetime_steps: float,
    swap_seconds: float,
    config: GateConfig,
) -> GateDecision:
    """Compare two drafters on the same R held-out rollouts, row by row.

    serving is None while the engines serve random weights that nobody trained: the candidate then has to beat an
    acceptance length of 1. prompts [R] names each rollout's prompt; None takes every rollout as one of its own.
    lifetime_steps: steps until the next candidate may replace this one. Acceptances that are not finite refuse the
    candidate, and so do too few rollouts unless config.publish_when is "always". Raises ValueError naming the argument when arguments do not fit each other.
    """
    _check_arguments(candidate, serving, prompts, lifetime_steps, swap_seconds)
    whole = candidate.steps.isfinite()
    num_rollouts = int(whole.sum())
    names = np.arange(len(whole)) if prompts is None else np.asarray(prompts)
    groups = np.unique(names[whole.numpy()], return_inverse=True)[1]
    num_groups = int(groups.max()) + 1 if num_rollouts else 0
    common = (config.margin, swap_seconds, num_rollouts, num_groups)
    if reason := _not_finite(candidate, serving):
        return GateDecision(False, f"refused: {reason}", *common)
    if reason := _too_little(num_rollouts, num_groups, prompts, config):
        if config.publish_when == "always":
            return GateDecision(True, f'published unjudged because publish_when = "always": {reason}', *common)
        return GateDecision(False, f"refused: {reason}", *common)

    steps, accepted = candidate.steps[whole].numpy(), candidate.accepted[whole].numpy()
    ours = _ratio(steps, accepted.sum(1), groups)
    if serving is None:
        theirs = (0.0, np.zeros(num_groups))
    else:
        theirs = _ratio(serving.steps[whole].numpy(), serving.accepted[whole].sum(1).numpy(), groups)
    length, gain = _estimate(1 + ours[0], ours[1]), _estimate(ours[0] - theirs[0], ours[1] - theirs[1])
    lower_bound = gain.value - float(stdtrit(num_groups - 1, config.confidence)) * gain.standard_error
    saved = lifetime_steps * pace.seconds_saved(1 + theirs[0], length.value)
    publish, reason = _verdict(lower_bound, saved, swap_seconds, config)
    rates = tuple((accepted.sum(0) / steps.sum()).tolist())
    return GateDecision(
        publish,
        f"{reason}: acceptance length {length.value:.3f} against {1 + theirs[0]:.3f} served, gain {gain.value:+.3f}, "
        f"at least {lower_bound:+.3f} ({config.confidence:.0%}, {num_rollouts} rollouts of {num_groups} prompts), "
        f"{saved:.2f} s saved before the next candidate, {swap_seconds:.2f} s for the swap",
        *common,
        candidate_length=length.value,
        serving_length=1 + theirs[0],
        gain=gain.value,
        lower_bound=lower_bound,
        seconds_saved=saved,
        promise=Promise(length, rates),
    )


def pace_of(batch: RolloutBatch) -> Pace | None:
    """Of one step's generation; None when nothing was generated. Each verification step emits what it accepts and 1."""
    accepted = sum(batch.speculation.accepted_per_position) if batch.speculation else 0
    if batch.num_generated_tokens <= accepted:
        return None
    return Pace(float(batch.num_generated_tokens), batch.seconds / (batch.num_generated_tokens - accepted))


def expected_of(rollouts: RolloutAcceptance, prompts: Sequence[str]) -> Promise | None:
    """What a drafter is expected to reach, from the rollouts without holes; None with fewer than two prompts of them.

    prompts [R] names each rollout's prompt.
    """
    whole = rollouts.steps.isfinite()
    groups = np.unique(np.asarray(prompts)[whole.numpy()], return_inverse=True)[1]
    if len(set(groups.tolist())) < 2:
        return None
    steps, accepted = rollouts.steps[whole].numpy(), rollouts.accepted[whole].numpy()
    rates = tuple((accepted.sum(0) / steps.sum()).tolist())
    return Promise(_length(steps, accepted.sum(1), groups), rates)


def served_length(rollouts: Sequence[Rollout]) -> Estimate | None:
    """Acceptance length of one step as the engines counted it; None with fewer than two prompts drafted for.

    Over rollouts that were drafted throughout: only of these is what drafts reach known.
    """
    drafted = [r for r in rollouts if r.drafted_throughout]
    counts = [(r.prompt_id, r.speculation) for r in drafted if r.speculation and r.speculation.num_drafts]
    if len({prompt for prompt, _ in counts}) < 2:
        return None
    groups = np.unique([prompt for prompt, _ in counts], return_inverse=True)[1]
    steps = np.array([c.num_drafts for _, c in counts], dtype=np.float64)
    return _length(steps, np.array([sum(c.accepted_per_position) for _, c in counts], dtype=np.float64), groups)


def noise_bound(first: Estimate, second: Estimate, alpha: float) -> float:
    """The difference of two independent estimates that chance exceeds with probability alpha (Welch's t, one-sided)."""
    parts = [estimate.standard_error**2 for estimate in (first, second)]
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / sum(p**2 / (e.num_groups - 1) for p, e in zip(parts, (first, second), strict=True))
    return float(stdtrit(freedom, 1 - alpha)) * sqrt(sum(parts))


def _length(steps: Array, accepted: Array, groups: NDArray[np.intp]) -> Estimate:
    ratio, without = _ratio(steps, accepted, groups)
    return _estimate(1 + ratio, without)


def _ratio(steps: Array, accepted: Array, groups: NDArray[np.intp]) -> tuple[float, Array]:
    """sum(accepted) / sum(steps), and [G] the same without each group."""
    per_group = np.stack([np.bincount(groups, weights) for weights in (accepted, steps)])  # [2, G]
    total = per_group.sum(1)
    return float(total[0] / total[1]), np.divide(*(total[:, None] - per_group))


def _estimate(value: float, without: Array) -> Estimate:
    """Jackknife: without [G] is the value without each group, up to a constant."""
    num_groups = len(without)
    squares = float(((without - without.mean()) ** 2).sum())
    return Estimate(value, sqrt((num_groups - 1) / num_groups * squares), num_groups)


def _verdict(lower_bound: float, saved: float, swap_seconds: float, config: GateConfig) -> tuple[bool, str]:
    if config.publish_when == "always":
        return True, 'published because publish_when = "always"'
    if lower_bound <= config.margin:
        return False, f"kept back, no gain above the margin of {config.margin:g} is certain"
    if saved <= swap_seconds:
        return False, "kept back, the swap would cost more than it saves"
    return True, "published"


def _not_finite(candidate: RolloutAcceptance, serving: RolloutAcceptance | None) -> str:
    """Whose acceptances are not finite; empty when all are that can be."""
    if serving is not None:
        for name, one, other in (("candidate", candidate, serving), ("served drafter", serving, candidate)):
            if broken := int((one.known < other.known).sum()):
                return f"acceptances of the {name} are not finite on {broken} of {len(one.known)} rollouts"
    if len(candidate.steps) and not candidate.known.any():
        return f"the candidate has finite acceptances on none of {len(candidate.steps)} held-out rollouts"
    return ""


def _too_little(num_rollouts: int, num_groups: int, prompts: Sequence[str] | None, config: GateConfig) -> str:
    """What is missing for a judgement; empty when it is possible."""
    if num_rollouts < config.min_rollouts:
        return f"{num_rollouts} held-out rollouts, min_rollouts is {config.min_rollouts}; hold out more"
    needed = 2 if prompts is None else config.min_prompts
    if num_groups < needed:
        return f"the held-out rollouts are of {num_groups} prompts, min_prompts is {needed}; hold out more prompts"
    return ""


def _check_arguments(
    candidate: RolloutAcceptance,
    serving: RolloutAcceptance | None,
    prompts: Sequence[str] | None,
    lifetime_steps: float,
    swap_seconds: float,
) -> None:
    for name, value in (("lifetime_steps", lifetime_steps), ("swap_seconds", swap_seconds)):
        if not 0 <= value < inf:
            raise ValueError(f"{name} is {value}; it must be finite and not negative")
    if serving is not None and serving.accepted.shape != candidate.accepted.shape:
        raise ValueError(
            f"candidate and serving are of {tuple(candidate.accepted.shape)} and {tuple(serving.accepted.shape)} "
            "(rollouts, draft tokens); score both on the same rollouts with the same draft length"
        )
    if prompts is not None and len(prompts) != len(candidate.steps):
        raise ValueError(f"prompts names {len(prompts)} rollouts, candidate has {len(candidate.steps)}")
