"""Acceptance lengths of a drafter, expected and served, with their noise, at the draft lengths that were really used.

An acceptance length is a ratio of two sums over rollouts (accepted draft tokens, verification steps), and rollouts of
one prompt resemble each other. Its noise is therefore that of leaving out one prompt at a time: the delete-one-group
jackknife (Efron and Stein, 1981; for ratios Cochran, Sampling Techniques, 6.17), with Student's t of one degree of
freedom less than there are prompts. It needs no random numbers, and unlike percentiles of a bootstrap it does not
become too narrow with few prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from cotrain.records import Rollout
from drafters.acceptance import RolloutAcceptance

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An acceptance length, or a gain in it, and its noise."""

    value: float
    standard_error: float
    num_groups: int
    """Prompts that the standard error comes from."""

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
class ExpectedAcceptance:
    """What a drafter is expected to reach on rollouts like those it was scored on, at each draft length 1 to K.

    The draft length decides where verification steps begin. On text of two easy tokens and a hard one, over and over,
    three draft tokens always start before the easy ones and one draft token starts before the hard one half of the
    time. What is expected at one length is therefore no bound of what is reached at another.
    """

    rates: tuple[tuple[float, ...], ...]
    """[K][K] share of verification steps with k + 1 draft tokens that accept position i + 1 and all before it; 0 for
    positions beyond the draft length."""
    without: tuple[tuple[float, ...], ...]
    """[K][G] accepted draft tokens per verification step with k + 1 draft tokens, without each of the prompts."""

    def __post_init__(self) -> None:
        most = len(self.rates)
        whole = most > 0 and all(len(row) == most and all(0 <= r <= 1 + 1e-9 for r in row) for row in self.rates)
        if not whole or len({len(row) for row in self.without}) != 1 or len(self.without) != most:
            raise ValueError(
                f"rates are {self.rates} for {len(self.without)} draft lengths; they must be shares, one for each "
                "draft length and position"
            )

    @property
    def draft_tokens(self) -> int:
        """K, the longest draft length of which something is expected."""
        return len(self.rates)

    @property
    def num_groups(self) -> int:
        """Prompts that the drafter was scored on."""
        return len(self.without[0])

    def at(self, steps: Sequence[int]) -> Estimate:
        """Acceptance length where steps[k] verification steps have k + 1 draft tokens.

        Raises ValueError when there are none, or when some have more than K draft tokens.
        """
        weights = self._weights(steps)
        return _estimate(1 + float(weights @ np.sum(self.rates, axis=1)), weights @ np.array(self.without))

    def rates_at(self, steps: Sequence[int]) -> tuple[float, ...]:
        """[K] the same by position: share of all these verification steps that accept it and all before it."""
        return tuple((self._weights(steps) @ np.array(self.rates)).tolist())

    @property
    def longest(self) -> Estimate:
        """Acceptance length with K draft tokens in every verification step."""
        return self.at([0] * (self.draft_tokens - 1) + [1])

    def _weights(self, steps: Sequence[int]) -> Array:
        counted = np.zeros(self.draft_tokens)
        counted[: len(steps)] = steps[: self.draft_tokens]
        if any(steps[self.draft_tokens :]) or not counted.sum():
            raise ValueError(
                f"verification steps by draft length are {list(steps)}, expected are 1 to {self.draft_tokens} draft "
                "tokens; score drafters at the longest draft length served"
            )
        return counted / counted.sum()


def expected_of(rollouts: Sequence[RolloutAcceptance], prompts: Sequence[str]) -> ExpectedAcceptance | None:
    """What a drafter is expected to reach, from its scores at draft lengths 1 to K on the same R rollouts.

    Rollouts with a hole are left out; None with fewer than two prompts of whole ones. prompts [R] names each rollout's
    prompt.
    """
    whole = rollouts[-1].steps.isfinite()
    groups = np.unique(np.asarray(prompts)[whole.numpy()], return_inverse=True)[1]
    if len(set(groups.tolist())) < 2:
        return None
    rates, without = [], []
    for scored in rollouts:
        steps, accepted = scored.steps[whole].numpy(), scored.accepted[whole].numpy()
        positions = (accepted.sum(0) / steps.sum()).tolist()
        rates.append(tuple(positions + [0.0] * (len(rollouts) - len(positions))))
        without.append(tuple(ratio(steps, accepted.sum(1), groups)[1].tolist()))
    return ExpectedAcceptance(tuple(rates), tuple(without))


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
    accepted = np.array([sum(c.accepted_per_position) for _, c in counts], dtype=np.float64)
    value, without = ratio(steps, accepted, groups)
    return _estimate(1 + value, without)


def gain_of(ours: RolloutAcceptance, theirs: RolloutAcceptance, groups: NDArray[np.intp]) -> Estimate:
    """Acceptance length of one drafter less that of another, at one draft length, on the same whole rollouts [R].

    groups [R] numbers each rollout's prompt.
    """
    (own, own_without), (other, other_without) = (
        ratio(scored.steps.numpy(), scored.accepted.sum(1).numpy(), groups) for scored in (ours, theirs)
    )
    return _estimate(own - other, own_without - other_without)


def noise_bound(first: Estimate, second: Estimate, alpha: float) -> float:
    """The difference of two independent estimates that chance exceeds with probability alpha (Welch's t, one-sided)."""
    parts = [estimate.standard_error**2 for estimate in (first, second)]
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / sum(p**2 / (e.num_groups - 1) for p, e in zip(parts, (first, second), strict=True))
    return float(stdtrit(freedom, 1 - alpha)) * sqrt(sum(parts))


def ratio(steps: Array, accepted: Array, groups: NDArray[np.intp]) -> tuple[float, Array]:
    """sum(accepted) / sum(steps), and [G] the same without each group."""
    per_group = np.stack([np.bincount(groups, weights) for weights in (accepted, steps)])  # [2, G]
    total = per_group.sum(1)
    return float(total[0] / total[1]), np.divide(*(total[:, None] - per_group))


def _estimate(value: float, without: Array) -> Estimate:
    """Jackknife: without [G] is the value without each group, up to a constant."""
    num_groups = len(without)
    squares = float(((without - without.mean()) ** 2).sum())
    return Estimate(value, sqrt((num_groups - 1) / num_groups * squares), num_groups)
