"""Acceptance of each draft position as the engine serves it, and the tokens a step of any draft length yields.

Position i has a conditional rate a_i: accepted, given that it was drafted and all before it were accepted. It does not
depend on the draft length, so that what is served at one length predicts the others:
L_k = 1 + sum_{i<=k} prod_{j<=i} a_j. Counts are kept by octave of the batch size, since the last requests of a batch
differ from the rest, and lean on all octaves together where they are few.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FIRST_RATE, FIRST_WEIGHT = 0.5, 2.0
"""Belief about the first position before anything was drafted, in drafts."""

DEPTH_WEIGHT = 4.0
"""A deeper position is believed to be like the one before it, with the weight of so many drafts."""

SHARED_WEIGHT = 300.0
"""Most drafts that all octaves together count for in one octave."""

KEPT_AFTER_SWAP, KEPT_WHEN_OFF, KEPT_AFTER_CHANGE = 200.0, 5.0, 15.0
"""Most drafts that old evidence goes on counting for: that of an older drafter, which as a rule is much like the new
one; the same while speculation is off, where a few drafts have to be enough to change that; and that from before a
sudden change."""

CHANGE_MEMORY, CHANGE_BOUND = 48.0, 4.5
"""Half-life in drafts, and bound in standard deviations, of the test for a sudden change."""


class ServedAcceptance:
    """Decayed counts of trials and acceptances by octave of the batch size and draft position."""

    def __init__(self, max_draft_tokens: int, max_batch: int, memory_drafts: float):
        octaves = max_batch.bit_length()
        self.max_batch, self.memory_drafts = max_batch, memory_drafts
        self._trials = np.zeros((octaves, max_draft_tokens))
        self._accepted = np.zeros((octaves, max_draft_tokens))
        self._shared_weight = np.full(octaves, SHARED_WEIGHT)
        self._surprise = np.zeros(octaves)  # decayed sum of acceptances above expectation
        self._surprise_variance = np.zeros(octaves)

    def observe(self, batch: int, trials: Sequence[int], accepted: Sequence[int]) -> bool:
        """Count one step or more at this batch size. Returns whether acceptance has changed all at once.

        trials[i]: drafts that had position i+1 and in which all before it were accepted. accepted[i]: those of them
        in which it was accepted too.
        """
        octave = self._octave(batch)
        new_trials, new_accepted = np.asarray(trials, float), np.asarray(accepted, float)
        if new_trials[0] == 0:
            return False
        changed = self._is_surprising(octave, new_trials, new_accepted)
        if changed:
            self._stand_alone(octave)
        decay = 0.5 ** (new_trials[0] / self.memory_drafts)
        self._trials[octave] = decay * self._trials[octave] + new_trials
        self._accepted[octave] = decay * self._accepted[octave] + new_accepted
        return changed

    def new_drafter(self, kept: float, expected_rates: Sequence[float] | None = None) -> None:
        """A new drafter serves: older counts weigh no more than `kept` drafts from here.

        expected_rates: what the drafter's evaluation promises, as vLLM counts (share of drafts that accept position i
        and all before it); it takes the place of the older counts. Nothing is known then of positions beyond it.
        """
        if expected_rates is not None:
            known = len(expected_rates)
            before = np.concatenate([[1.0], expected_rates[:-1]])
            rates = np.divide(expected_rates, before, out=np.zeros(known), where=before > 0)
            self._trials[:], self._accepted[:] = 0.0, 0.0
            self._trials[:, :known] = kept * before / len(self._trials)
            self._accepted[:, :known] = self._trials[:, :known] * rates
        total = self._trials.sum(0).max()
        if total > kept:
            self._trials *= kept / total
            self._accepted *= kept / total
        self._shared_weight[:] = SHARED_WEIGHT
        self._surprise[:] = self._surprise_variance[:] = 0

    def rates(self) -> tuple[Array, Array]:
        """Conditional rates [octaves, K], and the drafts each of them rests on."""
        shared, weight = self._posterior(self._trials.sum(0)[None], self._accepted.sum(0)[None])
        prior_weight = np.minimum(weight, self._shared_weight[:, None])
        # Own counts are part of the shared ones; where they are all there is, they must not count twice.
        others = self._trials.sum(0)[None] - self._trials
        prior_weight = np.minimum(prior_weight, np.maximum(others, DEPTH_WEIGHT))
        total = self._trials + prior_weight
        return (self._accepted + prior_weight * shared) / total, total

    def tokens_per_step(self) -> tuple[Array, Array]:
        """L_k of one request and the standard deviation of log L_k, each [K+1, max_batch]."""
        rates, weights = self.rates()
        survival = np.cumprod(rates, axis=1)  # [octaves, K]
        octaves, depth = rates.shape
        lengths = np.concatenate([np.ones((octaves, 1)), 1 + np.cumsum(survival, axis=1)], axis=1)
        variance = np.zeros((octaves, depth + 1))
        rate_variance = (rates * (1 - rates) + 0.25 / weights) / weights
        for k in range(1, depth + 1):
            # dL_k / da_j = sum_{j<=i<=k} survival_i / a_j
            slopes = np.cumsum(survival[:, :k][:, ::-1], axis=1)[:, ::-1] / np.maximum(rates[:, :k], 1e-9)
            variance[:, k] = (slopes**2 * rate_variance[:, :k]).sum(1)
        of_batch = [self._octave(batch) for batch in range(1, self.max_batch + 1)]
        return lengths[of_batch].T, (np.sqrt(variance) / lengths)[of_batch].T

    def _posterior(self, trials: Array, accepted: Array) -> tuple[Array, Array]:
        rates, weights = np.empty_like(trials), np.empty_like(trials)
        belief, weight = np.full(len(trials), FIRST_RATE), FIRST_WEIGHT
        for i in range(trials.shape[1]):
            weights[:, i] = trials[:, i] + weight
            rates[:, i] = (accepted[:, i] + weight * belief) / weights[:, i]
            belief, weight = rates[:, i], DEPTH_WEIGHT
        return rates, weights

    def _is_surprising(self, octave: int, trials: Array, accepted: Array) -> bool:
        """A martingale test: acceptances minus their expectation, decayed, against their standard deviation."""
        rates, weights = (table[octave] for table in self.rates())
        variance = rates * (1 - rates) * (1 + trials / weights)
        decay = 0.5 ** (trials[0] / CHANGE_MEMORY)
        self._surprise[octave] = decay * self._surprise[octave] + (accepted - trials * rates).sum()
        self._surprise_variance[octave] = decay**2 * self._surprise_variance[octave] + (trials * variance).sum()
        return bool(abs(self._surprise[octave]) > CHANGE_BOUND * np.sqrt(self._surprise_variance[octave] + 1))

    def _stand_alone(self, octave: int) -> None:
        """Acceptance here is not what it was, or not what it is elsewhere: old counts and the others weigh little."""
        scale = min(1.0, KEPT_AFTER_CHANGE / max(self._trials[octave, 0], 1.0))
        self._trials[octave] *= scale
        self._accepted[octave] *= scale
        self._shared_weight[octave] = DEPTH_WEIGHT
        self._surprise[octave] = self._surprise_variance[octave] = 0

    def _octave(self, batch: int) -> int:
        return min(batch, self.max_batch).bit_length() - 1
