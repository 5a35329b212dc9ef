"""Seconds of an engine step by draft length and batch size: interpolated between measured cells, or a law fitted to them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Cells = Mapping[tuple[int, int], float]
"""(draft length, batch size) -> seconds of a decode step."""

FAR = 1.5
"""Ratio of batch sizes from which on a difference of their step times is more than noise."""

Origin = Literal["measured", "fitted", "roofline"]


class StepTime(Protocol):
    """What an engine step of draft length k costs.

    base: [n] seconds of a decode step at these batch sizes, without the cost of context. slope: seconds per token of context, of
    all requests of the step together; 0 where the measurements do not tell. prefill: seconds that computing this many prompt
    tokens adds to the decode steps. covers: whether the step lies within what was measured; any other is extrapolated, and must
    be marked.
    """

    @property
    def origin(self) -> Origin: ...
    def base(self, k: int, batch: Array) -> Array: ...
    def slope(self, k: int) -> float:
        return 0.0

    def prefill(self, num_tokens: float) -> float: ...
    def covers(self, k: int, batch: int) -> bool: ...


class MeasuredCells(StepTime):
    """Interpolation: log seconds over log batch size between measured batches, seconds over k between measured draft lengths.
    No step takes less time than one with fewer draft tokens: cells of other batch sizes may contradict each other by noise.

    A batch below the smallest measured one costs the same as that. Beyond the largest, each request adds the mean slope between
    the largest cell and the next one of at most 1 / FAR its size, as in a law that is affine in the batch, but never less than 0.
    """

    origin: Origin = "measured"

    def __init__(self, cells: Cells, prefill_tokens_per_s: float | None = None):
        """Raises ValueError for no cells or for impossible ones."""
        _check(cells)
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._cells: dict[int, dict[int, float]] = {}
        for (k, batch), seconds in sorted(cells.items()):
            self._cells.setdefault(k, {})[batch] = seconds

    def base(self, k: int, batch: Array) -> Array:
        """[n] seconds. Raises ValueError for a k below the measured ones, or if only one other k was measured."""
        if k in self._cells:
            return np.maximum.reduce([self._at_length(shorter, batch) for shorter in self._cells if shorter <= k])
        lengths = list(self._cells)
        if k < lengths[0] or len(lengths) == 1:
            fix = "give cost.cells of its own, or take a run with rollout.speculation.adaptive=true, which has some"
            raise ValueError(f"steps were measured with k = {lengths}, which tells nothing of k = {k}: {fix}")
        upper = min(int(np.searchsorted(lengths, k)), len(lengths) - 1)
        low, high = (self.base(lengths[i], batch) for i in (upper - 1, upper))
        return high + (high - low) / (lengths[upper] - lengths[upper - 1]) * (k - lengths[upper])

    def _at_length(self, k: int, batch: Array) -> Array:
        sizes, times = np.array(list(self._cells[k].items()), float).T
        seconds = np.exp(np.interp(np.log(batch), np.log(sizes), np.log(times)))
        if (smaller := sizes * FAR <= sizes[-1]).any():
            size, time = sizes[smaller][-1], times[smaller][-1]
            seconds += max(0.0, (times[-1] - time) / (sizes[-1] - size)) * np.maximum(batch - sizes[-1], 0.0)
        return seconds

    def prefill(self, num_tokens: float) -> float:
        return num_tokens / self._prefill_tokens_per_s if self._prefill_tokens_per_s else 0.0

    def covers(self, k: int, batch: int) -> bool:
        around = [n for n in self._cells if n <= k][-1:] + [n for n in self._cells if n >= k][:1]
        return len(around) == 2 and all(min(self._cells[n]) <= batch <= max(self._cells[n]) for n in around)


@dataclass(frozen=True)
class FittedLaw(StepTime):
    """(m^p + (f T)^p)^(1/p) + k (d0 + d1 B) seconds of a step of B requests, which computes T = B (k + 1) rows.

    That is a roofline with a rounded ridge, m seconds for the weights and f for a row, and k draft passes that cost alike.
    """

    m: float
    f: float
    p: float
    d0: float
    d1: float
    fitted: tuple[int, int, int]
    """Largest k, least and largest batch size of the cells that it was fitted to."""
    origin: ClassVar[Origin] = "fitted"

    @classmethod
    def fit(cls, cells: Cells) -> "FittedLaw":
        """Least squares of relative errors. Raises ValueError with fewer than five cells, one batch size or one k."""
        from scipy.optimize import least_squares

        _check(cells)
        if len(cells) < 5 or any(len(set(axis)) < 2 for axis in zip(*cells, strict=True)):
            raise ValueError("a law of five constants needs five cells, two batch sizes and two draft lengths at least")
        (k, batch), seconds = np.array(list(cells), float).T, np.array(list(cells.values()))
        unit = np.array([seconds.min(), seconds.min(), 1.0, seconds.min(), seconds.min()])
        fitted = int(k.max()), int(batch.min()), int(batch.max())

        def law(logs: Array) -> FittedLaw:
            m, f, p, d0, d1 = (np.exp(logs) * unit).tolist()
            return cls(m, f, p, d0, d1, fitted)

        def errors(logs: Array) -> Array:
            return np.log(law(logs).base(k, batch) / seconds)

        starts = [(0.9, 0.05, 2.0, 0.1, 0.01), (0.9, 0.02, 1.3, 0.2, 0.001), (0.5, 0.1, 3.0, 0.01, 0.02)]
        bounds = ([-40, -40, 0, -40, -40], [40, 40, 4, 40, 40])
        fits = (least_squares(errors, np.log(x), bounds=bounds) for x in starts)
        return law(min(fits, key=lambda fit: fit.cost).x)

    @classmethod
    def leave_one_out(cls, cells: Cells) -> dict[tuple[int, int], float]:
        """Relative error of each cell when a law fitted to the others predicts it."""
        laws = {cell: cls.fit({other: cells[other] for other in cells if other != cell}) for cell in cells}
        return {(k, n): law.base(k, np.array([n])).item() / cells[k, n] - 1 for (k, n), law in laws.items()}

    def base(self, k: int | Array, batch: Array) -> Array:
        weights, rows = self.p * np.log(self.m), self.p * np.log(self.f * batch * (k + 1))
        return np.exp(np.logaddexp(weights, rows) / self.p) + k * (self.d0 + self.d1 * batch)

    def prefill(self, num_tokens: float) -> float:
        return self.base(0, np.array([num_tokens])).item() if num_tokens else 0.0

    def covers(self, k: int, batch: int) -> bool:
        return k <= self.fitted[0] and self.fitted[1] <= batch <= self.fitted[2]


def _check(cells: Cells) -> None:
    if not cells or any(k < 0 or batch < 1 or not 0 < seconds < np.inf for (k, batch), seconds in cells.items()):
        raise ValueError(f"step times {dict(cells)}: give seconds above 0 by (k from 0 on, batch size from 1 on)")
