"""Seconds of an engine step by draft length and batch size: measured at the start, corrected by trials.

Whether speculation pays depends on the ratio t_k / t_0 alone, and a busy neighbour slows all steps alike. So the steps
of the length in use only say how fast the machine is at the moment, its `pace`, and a trial of another length, a few
steps between those, says how far the table's ratio is off.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

QUANTILE = 0.25
"""Quantile of the measured steps that counts, since what disturbs a machine only makes steps slower, in bursts."""

PACE_STEPS, LEAST_PACE_STEPS = 15, 5
"""Latest steps whose median is the pace: late ones do not move it, and it follows a busy spell within eight. And those
that have to be known for a trial to be compared with."""

TRIAL_WEIGHT = 0.25
"""Share of a trial's error by which the table is corrected: noise of a trial is about as large as the table's errors."""


class StepCosts:
    """Log seconds for draft lengths 0 to K at batch sizes 1 to max_batch, linear in log batch between measured ones."""

    def __init__(
        self, max_speculative_tokens: int, max_batch: int, measured: Mapping[tuple[int, int], Sequence[float]]
    ):
        """measured: (draft length, batch size) -> seconds of steps. Batch sizes without all draft lengths are left out.

        Raises ValueError when that leaves none.
        """
        lengths = range(max_speculative_tokens + 1)
        sizes = sorted({batch for _, batch in measured if all(measured.get((k, batch)) for k in lengths)})
        if not sizes:
            raise ValueError("no batch size at which engine steps of all draft lengths were measured")
        self._log_batches = np.log2(np.arange(1, max_batch + 1))
        rows = ([np.log(np.quantile(measured[k, batch], QUANTILE)) for batch in sizes] for k in lengths)
        self._log_seconds = np.stack([np.interp(self._log_batches, np.log2(sizes), row) for row in rows])
        self._recent: deque[float] = deque([0.0], maxlen=PACE_STEPS)

    def ratios(self) -> Array:
        """[K+1, max_batch]: t_k / t_0."""
        return np.exp(self._log_seconds - self._log_seconds[0])

    def seconds(self, num_speculative_tokens: int, batch: int) -> float:
        """What a step takes at the present pace."""
        return float(np.exp(self._log_seconds[num_speculative_tokens, batch - 1] + median(self._recent)))

    @property
    def knows_pace(self) -> bool:
        """Have there been enough steps since `pause`?"""
        return len(self._recent) >= LEAST_PACE_STEPS

    def pause(self) -> None:
        """Other steps than those before come next, perhaps on a machine that is busier by then."""
        self._recent = deque([median(self._recent)], maxlen=PACE_STEPS)

    def follow(self, num_speculative_tokens: int, batch: int, seconds: float) -> None:
        """Learn the pace from a step of the length in use."""
        self._recent.append(float(np.log(seconds) - self._log_seconds[num_speculative_tokens, batch - 1]))

    def correct(self, num_speculative_tokens: int, batch: int, error: float) -> None:
        """Learn from a trial, whose steps took exp(error) times `seconds`, for batch sizes up to half and twice as large."""
        near = np.maximum(0.0, 1.0 - np.abs(self._log_batches - self._log_batches[batch - 1]))
        self._log_seconds[num_speculative_tokens] += TRIAL_WEIGHT * error * near
