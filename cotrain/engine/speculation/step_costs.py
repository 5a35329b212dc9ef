"""What an engine step of a draft length costs against one without drafts, t_k / t_0, learned from the steps that happen anyway.

For a given acceptance, whether speculation pays depends only on this ratio. A busy neighbour slows all steps alike, so each step
is compared with those just before it: a Kalman filter over log seconds separates the pace of the machine, which wanders, from what
a batch size and a draft length add to it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NOISE = 0.1
"""Standard deviation of the log seconds of single steps. A shared machine has about 0.12, a quiet one 0.02 and less."""

PACE_DRIFT, PAUSE_DRIFT, COST_DRIFT = 0.02, 0.2, 0.003
"""How far log seconds wander: the machine's pace from one step to the next and over a pause, and t_k / t_0 from step to step, for
instance because texts grow."""

OUTLIER = 3.0
"""A step that is more standard deviations off counts as one that is this many off: single steps of a shared machine come late."""

USUAL_COST, COST_ERROR, BATCH_ERROR = 0.12, 0.25, 0.5
"""Assumed before any step: log t_k / t_0 for each draft token, its standard deviation, and that of log t_0 from one measured batch
size to the next."""

SIZES_ALIKE = 0.5  # assumed correlation of t_k / t_0 at neighbouring sizes

FIRST_DRAFT_SHARE = 0.5
"""Share of t_1 / t_0 - 1 that a batch pays as soon as any of its requests drafts. With 16 requests on two cores a step took 1.26
times as long as one without drafts at 0.29 draft tokens a request, and 1.32 times at 0.62; by that line the share is 0.53."""


class StepCosts:
    """t_k / t_0 at the batch sizes 1, 4, 16, ..., max_batch, log-linear between them."""

    def __init__(self, max_speculative_tokens: int, max_batch: int):
        self._num_lengths = max_speculative_tokens
        self.sizes = [4**i for i in range(max_batch.bit_length()) if 4**i < max_batch] + [max_batch]
        at = np.log2(np.arange(1, max_batch + 1))
        corners = np.eye(len(self.sizes))
        self._shares = np.stack([np.interp(at, np.log2(self.sizes), corner) for corner in corners], axis=1)
        """[max_batch, sizes] how much each size counts for a batch."""
        # The state: the pace, log t_0 at each size, and log t_k / t_0 [K, sizes].
        steps, sizes = np.arange(1, max_speculative_tokens + 1), np.arange(len(self.sizes))
        alike = np.kron(np.minimum.outer(steps, steps), SIZES_ALIKE ** abs(np.subtract.outer(sizes, sizes)))
        first, size = 1 + len(sizes), 1 + len(sizes) + len(alike)
        self._mean, self._errors = np.zeros(size), np.zeros((size, size))
        self._errors[0, 0] = 100.0
        self._errors[1:first, 1:first] = BATCH_ERROR**2 * np.minimum.outer(sizes, sizes)
        self._mean[first:] = np.repeat(USUAL_COST * steps, len(sizes))
        self._errors[first:, first:] = COST_ERROR**2 * alike
        self._drift = np.r_[PACE_DRIFT**2, np.zeros(len(sizes)), np.full(size - first, COST_DRIFT**2)]

    def observe(self, length: float, batch: int, seconds: float) -> None:
        """Learn from a step that drafts and verifies so many tokens of each request, on average."""
        row, errors = self._row(length, batch), self._errors
        errors.flat[:: len(row) + 1] += self._drift
        spread = errors @ row
        variance = float(row @ spread) + NOISE**2
        bound = OUTLIER * variance**0.5
        surprise = float(np.log(seconds) - row @ self._mean)
        if abs(surprise) > bound:  # the next step tells whether the machine has become another one
            self.pause()
            surprise = bound if surprise > 0 else -bound
        self._mean += spread * (surprise / variance)
        errors -= np.outer(spread, spread / variance)

    def pause(self) -> None:
        """Note that the next step may come at another pace."""
        self._errors[0, 0] += PAUSE_DRIFT**2

    def ratios(self) -> Array:
        """Return t_k / t_0 [K+1, max_batch].

        A step with more draft tokens computes more, so where it seems faster that is noise, and t_k / t_0 never falls with k.
        """
        logs = self._part(self._mean) @ self._shares.T
        return np.asarray(np.exp(np.maximum.accumulate(np.vstack([np.zeros(len(self._shares)), logs]))))

    def errors(self, batch: int) -> Array:
        """Return the standard errors of log t_k / t_0 [K+1]."""
        k, sizes = self._num_lengths, len(self.sizes)
        first, shares = 1 + sizes, self._shares[batch - 1]
        blocks = self._errors[first:, first:].reshape(k, sizes, k, sizes)
        variances = np.einsum("a,kakb,b->k", shares, blocks, shares)
        return np.concatenate([[0.0], np.sqrt(np.maximum(variances, 0.0))])

    def _part(self, state: Array) -> Array:
        """Return the part of a state that is log t_k / t_0 [K, sizes], not copied."""
        return state[1 + len(self.sizes) :].reshape(self._num_lengths, len(self.sizes))

    def _row(self, length: float, batch: int) -> Array:
        """Return how much each part of the state adds to the log seconds of a step."""
        row, shares = np.zeros(len(self._mean)), self._shares[batch - 1]
        row[0], row[1 : 1 + len(shares)] = 1.0, shares
        if length:
            below, part = int(length), self._part(row)
            rest = length - below if below else FIRST_DRAFT_SHARE + length * (1 - FIRST_DRAFT_SHARE)
            if below:
                part[below - 1] = (1 - rest) * shares
            if below < self._num_lengths:
                part[below] = rest * shares
        return row


def ratio_at(ratios: Sequence[float], length: float) -> float:
    """Return the time of a step whose requests draft `length` tokens on average, as a multiple of t_0. ratios [K+1]: t_k / t_0."""
    if 0 < length < 1:
        return 1 + (FIRST_DRAFT_SHARE + length * (1 - FIRST_DRAFT_SHARE)) * (ratios[1] - 1)
    return float(np.interp(length, range(len(ratios)), ratios))
