"""What an engine step of a draft length costs against one without drafts, t_k / t_0, as measured at the start of an engine.

For a given acceptance, whether speculation pays depends only on this ratio, and a busy neighbour slows all steps alike. So the
table is never corrected by the times of later steps.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

QUANTILE = 0.25
"""Quantile of the measured times that is used, since disturbances of a machine only make steps slower, and come in bursts."""

FIRST_DRAFT_SHARE = 0.5
"""Share of t_1 / t_0 - 1 that a batch pays as soon as any of its requests drafts. With 16 requests on two cores a step took 1.26
times as long as one without drafts at 0.29 draft tokens a request, and 1.32 times at 0.62; by that line the share is 0.53."""


def step_ratios(
    max_speculative_tokens: int, max_batch: int, measured: Mapping[tuple[int, int], Sequence[float]]
) -> Array:
    """Return t_k / t_0 [K+1, max_batch], linear in log batch between measured batch sizes.

    measured: (draft length, batch size) -> seconds of steps. Batch sizes without all draft lengths are left out. A step with more
    draft tokens computes more, so where it was faster that was noise, and t_k / t_0 never falls with k. Raises ValueError when no batch size is left.
    """
    lengths = range(max_speculative_tokens + 1)
    sizes = sorted({batch for _, batch in measured if all(measured.get((k, batch)) for k in lengths)})
    if not sizes:
        raise ValueError("no batch size at which engine steps of all draft lengths were measured")
    rows = np.log([[np.quantile(measured[k, batch], QUANTILE) for batch in sizes] for k in lengths])
    batches = np.log2(np.arange(1, max_batch + 1))
    table = np.stack([np.interp(batches, np.log2(sizes), row) for row in np.maximum.accumulate(rows)])
    return np.asarray(np.exp(table - table[0]))


def ratio_at(ratios: Sequence[float], length: float) -> float:
    """Return the time of a step whose requests draft `length` tokens on average, as a multiple of t_0. ratios [K+1]: t_k / t_0."""
    if 0 < length < 1:
        return 1 + (FIRST_DRAFT_SHARE + length * (1 - FIRST_DRAFT_SHARE)) * (ratios[1] - 1)
    return float(np.interp(length, range(len(ratios)), ratios))
