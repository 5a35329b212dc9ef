"""Seconds of an engine step by draft length and batch size: timed at the start, refined by every step.

A robust Kalman filter on log seconds. The state is log t_0 (no speculation) and log t_k / t_0 for each k at batch
sizes spaced by factors of two, linear in log b between. Noise that slows all steps alike moves t_0 only: whether
speculation pays depends on the ratios alone, and these must not follow a busy neighbour. The prior is an
Ornstein-Uhlenbeck process in log b, so that what was timed at one batch size also informs the next.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

Array = NDArray[np.float64]

BASE_PRIOR_VARIANCE, RATIO_PRIOR_VARIANCE = 4.0, 0.6
CORRELATION_OCTAVES = 24.0
"""Batch sizes this many octaves apart are correlated by 1/e in the prior."""

COMMON_DRIFT, BASE_DRIFT, RATIO_DRIFT = 0.01**2, 0.001**2, 0.0005**2
"""Variance added with every step: machine as a whole, t_0 of one batch size, ratio of one draft length."""

STEPS_ALIKE = 4.0
"""Steps that count as one: what disturbs a machine lasts, so that the mean of a few steps in a row is off by twice what
their spread says. (SmolLM2 on two shared cores, 177 times 3 to 8 steps: variance of the means, times the number of
steps, over the variance within: 3.5 in the median.)"""

LEAST_TIMING_ERROR = 0.05
"""Relative error of one timing at the start, at least: a few rounds cannot show how far off a round can be."""

PACE_VARIANCE = 0.5**2
"""Of log t_0 when the pace of the whole machine may have changed: after timings made on purpose, and a shift."""

SHIFT_STEPS = 3
"""Clipped steps in a row, all to the same side, that are no outliers."""

CLIP = 3.0
"""Residuals count for at most this many standard deviations of a step's noise."""


class StepCostModel:
    """Step times for draft lengths 0..K and batch sizes 1..max_batch."""

    def __init__(self, max_draft_tokens: int, max_batch: int):
        """Knows nothing yet: ratios around 1.25 for each draft token, with a standard deviation of 0.8 in log."""
        self.max_draft_tokens, self.max_batch = max_draft_tokens, max_batch
        octaves = [2**i for i in range(max_batch.bit_length()) if 2**i < max_batch]
        self._anchors = np.log2([*octaves, max_batch])
        self._num_anchors = num = len(self._anchors)
        self._weights = _interpolation(np.log2(np.arange(1, max_batch + 1)), self._anchors)
        near = np.exp(-np.abs(self._anchors[:, None] - self._anchors[None, :]) / CORRELATION_OCTAVES)
        lengths = np.arange(max_draft_tokens + 1)
        self._mean = np.repeat(np.where(lengths > 0, np.log1p(0.25 * lengths), np.log(0.03)), num)
        self._covariance = np.kron(np.diag(np.where(lengths > 0, RATIO_PRIOR_VARIANCE, BASE_PRIOR_VARIANCE)), near)
        self._drift = np.kron(np.diag(np.where(lengths > 0, RATIO_DRIFT, 0.0)), near)
        self._drift[:num, :num] += COMMON_DRIFT + BASE_DRIFT * np.eye(num)
        self._noise_median = 0.07
        """Running median of absolute residuals; 0.6745 standard deviations of a normal law."""
        self._far_in_a_row = 0
        """Latest steps in a row that were clipped, all slower (positive) or all faster."""

    def learn_timings(self, timings: Sequence[tuple[int, int, Sequence[float]]]) -> None:
        """Timings made on purpose, (k, b, seconds of some engine steps); those of a cell count together.

        Of their steps the lower quartile counts, not the median: what disturbs a machine only makes steps slower, in
        bursts that can be longer than a timing, and all lengths' quartiles have the ratio that their medians have.
        (SmolLM2 on two shared cores, 16 cells, three timings each: a ratio is off by 5 % instead of 11 %.) Call it once.
        Raises ValueError for a length or batch size out of range, or a time that is not positive.
        """
        cells: dict[tuple[int, int], list[Array]] = defaultdict(list)
        for k, batch, seconds in timings:
            steps = np.asarray(seconds, float)
            known = 0 <= k <= self.max_draft_tokens and 1 <= batch <= self.max_batch
            if not (known and steps.size and np.isfinite(steps).all() and (steps > 0).all()):
                raise ValueError(
                    f"steps of {list(seconds)} seconds at k={k}, batch {batch}; wanted are positive times, k 0 to "
                    f"{self.max_draft_tokens} and batch 1 to {self.max_batch}"
                )
            cells[k, batch].append(np.log(steps))
        quartiles = {cell: float(np.quantile(np.concatenate(parts), 0.25)) for cell, parts in cells.items()}
        deviations = [
            abs(float(np.quantile(part, 0.25)) - quartiles[cell]) for cell, parts in cells.items() for part in parts
        ]
        spread = max(1.4826 * float(np.median(deviations)) if deviations else 0.0, LEAST_TIMING_ERROR)
        for (k, batch), quartile in quartiles.items():
            # pi / 2: variance of a quantile against that of a mean, about
            self._update(self._row(k, batch), quartile, np.pi / 2 * spread**2 / len(cells[k, batch]))
        self._forget_pace()

    def observe(self, draft_tokens: int, batch: int, seconds: float) -> None:
        """One engine step in which every request verified and drafted `draft_tokens`, and no prompt was prefilled."""
        self._covariance += self._drift
        row = self._row(draft_tokens, batch)
        residual = float(np.log(seconds) - row @ self._mean)
        noise = max(self._noise_median / 0.6745, 0.01)
        self._noise_median *= np.exp(0.05 if abs(residual) > self._noise_median else -0.05)
        bound = CLIP * float(np.sqrt(noise**2 + row @ self._covariance @ row))
        far = int(np.sign(residual)) if abs(residual) > bound else 0
        self._far_in_a_row = self._far_in_a_row + far if far * self._far_in_a_row >= 0 and far else far
        if abs(self._far_in_a_row) >= SHIFT_STEPS:
            self._forget_pace()
            self._far_in_a_row = 0
        self._update(row, row @ self._mean + np.clip(residual, -bound, bound), STEPS_ALIKE * noise**2)

    def seconds(self) -> Array:
        """[K+1, max_batch]: step times, never falling with the batch size (isotonic over the anchors)."""
        num, levels = self._num_anchors, []
        for k in range(self.max_draft_tokens + 1):
            rows = np.zeros((num, len(self._mean)))
            rows[:, :num] = np.eye(num)
            rows[:, k * num : (k + 1) * num] = np.eye(num)
            variances = np.einsum("ai,ij,aj->a", rows, self._covariance, rows)
            levels.append(isotonic_regression(rows @ self._mean, weights=1 / variances).x)
        return np.exp(np.array(levels) @ self._weights.T)

    def ratio_error(self) -> Array:
        """[K+1, max_batch]: standard deviation of log t_k / t_0."""
        num = self._num_anchors
        errors = np.zeros((self.max_draft_tokens + 1, self.max_batch))
        for k in range(1, self.max_draft_tokens + 1):
            block = self._covariance[k * num : (k + 1) * num, k * num : (k + 1) * num]
            errors[k] = np.sqrt(np.einsum("ba,ac,bc->b", self._weights, block, self._weights))
        return errors

    def _forget_pace(self) -> None:
        """The machine as a whole may be faster or slower from here; the ratios stay."""
        self._covariance[: self._num_anchors, : self._num_anchors] += PACE_VARIANCE

    def _row(self, draft_tokens: int, batch: int) -> Array:
        num = self._num_anchors
        row = np.zeros(len(self._mean))
        row[:num] = row[draft_tokens * num : (draft_tokens + 1) * num] = self._weights[min(batch, self.max_batch) - 1]
        return row

    def _update(self, row: Array, value: float, variance: float) -> None:
        projected = self._covariance @ row
        gain = projected / (row @ projected + variance)
        self._mean += gain * (value - row @ self._mean)
        self._covariance -= np.outer(gain, projected)


def default_batch_sizes(max_batch: int) -> list[int]:
    """1, 4, 16, ... and max_batch."""
    return [4**i for i in range(max_batch.bit_length()) if 4**i < max_batch] + [max_batch]


def _interpolation(points: Array, anchors: Array) -> Array:
    """[P, A] weights of linear interpolation."""
    return np.stack([np.interp(points, anchors, unit) for unit in np.eye(len(anchors))], axis=1)
