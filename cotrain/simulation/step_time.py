"""Seconds of an engine step by draft length and batch size: interpolated between measured cells, or a law fitted to them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Cells = Mapping[tuple[int, int], float]
"""(draft length, batch size) -> seconds of a decode step."""

Origin = Literal["measured", "fitted", "roofline"]


class StepTime(Protocol):
    """What a step costs. k is the draft length, batch the number of requests in the step."""

    @property
    def origin(self) -> Origin: ...

    def base(self, k: int, batch: Array) -> Array:
        """[n] seconds of a decode step at these batch sizes, without what its context costs."""
        ...

    def slope(self, k: int) -> float:
        """Seconds for each token of context that the requests of the step hold together."""
        ...

    def prefill(self, num_tokens: float) -> float:
        """Seconds that computing so many prompt tokens takes beside the decode steps."""
        ...

    def covers(self, k: int, batch: int) -> bool:
        """Is the step within what was measured? What lies outside is extrapolated, and to be marked."""
        ...


class MeasuredCells:
    """Linear in log seconds over log batch size between measured batch sizes, and in k between measured draft lengths.

    Beyond the last cell it goes on with the slope between the last two, but never gets cheaper.
    """

    origin: Origin = "measured"

    def __init__(self, cells: Cells, prefill_tokens_per_s: float | None = None, slope: float = 0.0):
        """slope: seconds a token of context, for all draft lengths. Without a prefill rate prompts cost nothing.

        Raises ValueError for cells that are not positive, or where nothing was measured.
        """
        _check(cells)
        if prefill_tokens_per_s is not None and prefill_tokens_per_s <= 0:
            raise ValueError(f"prefill_tokens_per_s is {prefill_tokens_per_s}: give a positive rate, or none")
        self._prefill_tokens_per_s, self._slope = prefill_tokens_per_s, slope
        by_length: dict[int, dict[int, float]] = {}
        for (k, batch), seconds in sorted(cells.items()):
            by_length.setdefault(k, {})[batch] = seconds
        self._cells = by_length

    def base(self, k: int, batch: Array) -> Array:
        """[n] seconds. Raises ValueError for a draft length that one measured length alone does not tell."""
        lengths = list(self._cells)
        if k in self._cells:
            return self._at_length(k, batch)
        if len(lengths) == 1:
            raise ValueError(f"step times were measured at k = {lengths[0]} alone: k = {k} needs cells of its own")
        upper = min(max(int(np.searchsorted(lengths, k)), 1), len(lengths) - 1)
        low, high = lengths[upper - 1], lengths[upper]
        rise = (self._at_length(high, batch) - self._at_length(low, batch)) / (high - low)
        if k > high:
            return self._at_length(high, batch) + np.maximum(rise, 0.0) * (k - high)
        return np.maximum(self._at_length(low, batch) + rise * (k - low), np.finfo(float).tiny)

    def _at_length(self, k: int, batch: Array) -> Array:
        x, y = np.log(np.array(list(self._cells[k].items()), float)).T
        wanted = np.log(np.asarray(batch, float))
        seconds = np.interp(wanted, x, y)
        if len(x) > 1:
            first, last = (max(0.0, (y[i + 1] - y[i]) / (x[i + 1] - x[i])) for i in (0, len(x) - 2))
            seconds += first * np.minimum(wanted - x[0], 0.0) + last * np.maximum(wanted - x[-1], 0.0)
        return np.exp(seconds)

    def slope(self, k: int) -> float:
        return self._slope

    def prefill(self, num_tokens: float) -> float:
        return num_tokens / self._prefill_tokens_per_s if self._prefill_tokens_per_s else 0.0

    def covers(self, k: int, batch: int) -> bool:
        lengths = [length for length in self._cells if length <= k][-1:] + [n for n in self._cells if n >= k][:1]
        inside = all(min(self._cells[n]) <= batch <= max(self._cells[n]) for n in lengths)
        return len(lengths) == 2 and inside


@dataclass(frozen=True)
class FittedLaw:
    """((m)^p + (f T)^p)^(1/p) + k (d0 + d1 B) seconds of a step of B requests, which computes T = B (k + 1) rows.

    A roofline with a rounded ridge, and draft passes that cost alike: m seconds for reading the weights, f for a row.
    """

    m: float
    f: float
    p: float
    d0: float
    d1: float
    largest: tuple[int, int]
    """Largest k and batch size of the cells it was fitted to."""

    origin = "fitted"

    @classmethod
    def fit(cls, cells: Cells) -> "FittedLaw":
        """Least squares of relative errors. Raises ValueError with fewer than five cells, one batch size or one k."""
        from scipy.optimize import least_squares

        _check(cells)
        if len(cells) < 5 or any(len(set(axis)) < 2 for axis in zip(*cells, strict=True)):
            raise ValueError(
                "a law of five constants needs five cells, of two batch sizes and two draft lengths at least"
            )
        keys, seconds = np.array(list(cells), float), np.array(list(cells.values()))
        k, batch = keys.T
        scale = seconds.min()

        def errors(x: Array) -> Array:
            return np.log(_law(np.exp(x[[0, 1, 3, 4]]) * scale, 1 + np.exp(x[2]), k, batch) / seconds)

        starts = [(0.9, 0.05, 1.0, 0.1, 0.01), (0.9, 0.02, 0.3, 0.2, 0.001), (0.5, 0.1, 2.0, 0.01, 0.02)]
        found = min((least_squares(errors, np.log(x), max_nfev=400) for x in starts), key=lambda fit: fit.cost).x
        m, f, d0, d1 = (float(c) for c in np.exp(found[[0, 1, 3, 4]]) * scale)
        return cls(m, f, float(1 + np.exp(found[2])), d0, d1, (int(k.max()), int(batch.max())))

    @classmethod
    def leave_one_out(cls, cells: Cells) -> dict[tuple[int, int], float]:
        """Relative error of each cell when a law fitted to the others predicts it."""
        errors = {}
        for k, batch in cells:
            law = cls.fit({cell: seconds for cell, seconds in cells.items() if cell != (k, batch)})
            errors[k, batch] = float(law.base(k, np.array([float(batch)]))[0]) / cells[k, batch] - 1
        return errors

    def base(self, k: int, batch: Array) -> Array:
        return _law(np.array([self.m, self.f, self.d0, self.d1]), self.p, k, np.asarray(batch, float))

    def slope(self, k: int) -> float:
        return 0.0

    def prefill(self, num_tokens: float) -> float:
        return float(self.base(0, np.array([num_tokens]))[0]) if num_tokens else 0.0

    def covers(self, k: int, batch: int) -> bool:
        return k <= self.largest[0] and batch <= self.largest[1]


def _law(constants: Array, p: float, k: Array | float, batch: Array) -> Array:
    m, f, d0, d1 = constants
    rows = batch * (k + 1)
    return np.exp(np.logaddexp(p * np.log(m), p * np.log(f * rows)) / p) + k * (d0 + d1 * batch)


def _check(cells: Cells) -> None:
    if not cells:
        raise ValueError("no measured step times: give cells of (draft length, batch size) and seconds")
    for (k, batch), seconds in cells.items():
        if k < 0 or batch < 1 or not 0 < seconds < np.inf:
            raise ValueError(
                f"step time {seconds} s at k = {k}, batch {batch}: k from 0, batch from 1, seconds above 0"
            )
