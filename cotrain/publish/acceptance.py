"""Acceptance lengths that drafters are expected to reach, with their noise, at the draft lengths that were really used.

An acceptance length is a ratio of two sums over rollouts (accepted draft tokens, verification steps), and rollouts of
one prompt resemble each other. Its noise is therefore that of leaving out one prompt at a time: the delete-one-group
jackknife (Efron and Stein, 1981; for ratios Cochran, Sampling Techniques, 6.17), with Student's t of one degree of
freedom less than there are prompts. It needs no random numbers, and unlike percentiles of a bootstrap it does not
become too narrow with few prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from drafters.acceptance import RolloutAcceptance

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AcceptanceEstimate:
    """An acceptance length, or a gain in it, and its noise."""

    value: float
    standard_error: float
    num_prompts: int
    """Prompts that the standard error comes from."""

    def lower_bound(self, confidence: float) -> float:
        """The true value is above it with this confidence (Student's t, one-sided)."""
        return self.value - float(stdtrit(self.num_prompts - 1, confidence)) * self.standard_error


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
    """[K][G] accepted draft tokens per verification step with k + 1 draft tokens, without each of the G prompts."""
    num_rollouts: int = 0
    """R, the rollouts that the drafter was scored on."""

    @property
    def num_prompts(self) -> int:
        """G, the prompts that the drafter was scored on."""
        return len(self.without[0])

    def covers(self, steps: Sequence[int]) -> bool:
        """Whether something is expected of these verification steps by draft length: there are some, of K at most."""
        return any(steps) and not any(steps[len(self.rates) :])

    def at(self, steps: Sequence[int]) -> AcceptanceEstimate:
        """Acceptance length where steps[k] verification steps have k + 1 draft tokens; they must be covered."""
        weights = self._weights(steps)
        return _estimate(1 + float(weights @ np.sum(self.rates, axis=1)), weights @ np.array(self.without))

    def rates_at(self, steps: Sequence[int]) -> tuple[float, ...]:
        """[K] the same by position: share of all these verification steps that accept it and all before it."""
        return tuple((self._weights(steps) @ np.array(self.rates)).tolist())

    @property
    def longest(self) -> AcceptanceEstimate:
        """Acceptance length with K draft tokens in every verification step."""
        return self.at([0] * (len(self.rates) - 1) + [1])

    def lowest_served(self, steps: Sequence[int], num_prompts: int, tolerance: float, chance: float) -> float:
        """Acceptance length below which chance takes so good a drafter with this probability (Satterthwaite's t).

        `tolerance` is an acceptance length by which it may fall short beyond noise. The noise of `num_prompts` served
        prompts has two parts: what varies between prompts, from the standard error of the expectation, and the chance
        of each acceptance, from the expected rates. With P(A >= k) = r_k accepted draft tokens A have
        E[A^2] = sum (2k - 1) r_k.
        """
        length, rates = self.at(steps), self.rates_at(steps)
        between = length.standard_error**2 * (1 + length.num_prompts / num_prompts)
        within = (sum((2 * k - 1) * r for k, r in enumerate(rates, start=1)) - sum(rates) ** 2) / sum(steps)
        variance = between + max(within, 0.0)
        freedom = (length.num_prompts - 1) * (variance / between) ** 2 if between else np.inf
        return length.value - tolerance - float(stdtrit(min(freedom, 1e9), 1 - chance)) * sqrt(variance)

    def _weights(self, steps: Sequence[int]) -> Array:
        counted = np.zeros(len(self.rates))
        counted[: len(steps)] = steps[: len(self.rates)]
        return counted / counted.sum()


def expected_of(scores: Sequence[RolloutAcceptance], prompts: Sequence[str]) -> ExpectedAcceptance | None:
    """What a drafter is expected to reach, from its scores on the same R rollouts at draft lengths 1 to K.

    Rollouts with a hole are left out; None with fewer than two prompts of whole ones. prompts [R] names each rollout's
    prompt.
    """
    whole = scores[-1].steps.isfinite().numpy()
    groups = np.unique(np.asarray(prompts)[whole], return_inverse=True)[1]
    if len(set(groups.tolist())) < 2:
        return None
    rates, without = [], []
    for scored in scores:
        steps, accepted = scored.steps.numpy()[whole], scored.accepted.numpy()[whole]
        positions = (accepted.sum(0) / steps.sum()).tolist()
        rates.append(tuple(positions + [0.0] * (len(scores) - len(positions))))
        per_group = np.stack([np.bincount(groups, weights) for weights in (accepted.sum(1), steps)])  # [2, G]
        without.append(tuple(np.divide(*(per_group.sum(1)[:, None] - per_group)).tolist()))
    return ExpectedAcceptance(tuple(rates), tuple(without), int(whole.sum()))


def gain_of(candidate: ExpectedAcceptance, serving: ExpectedAcceptance) -> AcceptanceEstimate:
    """Acceptance length of one drafter less that of another, scored on the same rollouts, at the longest draft length.

    What makes a prompt easy to draft cancels out of the difference, and so out of its noise.
    """
    without = np.array(candidate.without[-1]) - np.array(serving.without[-1])
    return _estimate(candidate.longest.value - serving.longest.value, without)


def _estimate(value: float, without: Array) -> AcceptanceEstimate:
    """Jackknife: `without` [G] is the value without each group, up to a constant."""
    num_groups = len(without)
    squares = float(((without - without.mean()) ** 2).sum())
    return AcceptanceEstimate(value, sqrt((num_groups - 1) / num_groups * squares), num_groups)
