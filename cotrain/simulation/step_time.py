"""Seconds of an engine step by draft length and batch size, interpolated between measured cells."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class MeasuredCells:
    """Interpolation: log seconds over log batch size between measured batches, seconds over k between measured draft lengths.

    A step with fewer draft tokens never costs more than one with more: where measurements say so, it is noise, and the smaller
    time counts, so that noise makes no gain. A batch below the smallest measured one costs the same as that. Beyond the largest,
    each request adds the mean slope down to the next cell that is smaller by a third, since less is noise, but never less than 0.
    """

    def __init__(self, cells: Mapping[tuple[int, int], float], prefill_tokens_per_s: float | None = None):
        """cells: seconds of a decode step by draft length and batch size."""
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._cells: dict[int, dict[int, float]] = {}
        for (k, batch), seconds in sorted(cells.items()):
            self._cells.setdefault(k, {})[batch] = seconds

    def base(self, k: int, batch: Array) -> Array:
        """[n] seconds of a decode step with k draft tokens at these batch sizes.

        Raises ValueError for a k below the measured ones, or if only one other k was measured.
        """
        lengths = list(self._cells)
        if k not in lengths and (k < lengths[0] or len(lengths) == 1):
            fix = "give cost.cells of its own, or take a run with rollout.speculation.adaptive=true, which has some"
            raise ValueError(f"cost.cells: steps with k = {lengths} tell nothing of k = {k}: {fix}")
        times = np.minimum.accumulate([self._measured(n, batch) for n in reversed(lengths)])[::-1]
        if k in lengths:
            return times[lengths.index(k)]
        upper = min(int(np.searchsorted(lengths, k)), len(lengths) - 1)
        share = (k - lengths[upper - 1]) / (lengths[upper] - lengths[upper - 1])
        return times[upper - 1] + share * (times[upper] - times[upper - 1])

    def _measured(self, k: int, batch: Array) -> Array:
        sizes, times = np.array(list(self._cells[k].items()), float).T
        seconds = np.exp(np.interp(np.log(batch), np.log(sizes), np.log(times)))
        if (smaller := sizes * 1.5 <= sizes[-1]).any():
            slope = (times[-1] - times[smaller][-1]) / (sizes[-1] - sizes[smaller][-1])
            seconds += max(0.0, slope) * np.maximum(batch - sizes[-1], 0.0)
        return seconds

    def slope(self, k: int) -> float:
        """Further seconds per token of context, of all requests together. Measurements do not tell them apart."""
        return 0.0

    def prefill(self, num_tokens: float) -> float:
        """Seconds that computing so many prompt tokens adds to decode steps."""
        return num_tokens / self._prefill_tokens_per_s if self._prefill_tokens_per_s else 0.0

    def covers(self, k: int, batch: int) -> bool:
        """Whether the step lies within what was measured; any other is extrapolated."""
        around = [n for n in self._cells if n <= k][-1:] + [n for n in self._cells if n >= k][:1]
        return len(around) == 2 and all(min(self._cells[n]) <= batch <= max(self._cells[n]) for n in around)
