"""The core: how many draft tokens a verification step accepts, and how long engines take to generate responses."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cotrain.simulation.roofline import StepTimes
from cotrain.simulation.step_time import Array

Ints = NDArray[np.int64]


class Acceptance:
    """Survival by draft position: the share of drafts of which at least j tokens are accepted."""

    def __init__(self, survival: Sequence[float], by_depth: Sequence[tuple[int, Sequence[float]]] = ()):
        """by_depth: (first response token, survival from there on). Raises ValueError for a survival that is empty, rises or leaves
        0 to 1, and for depths that do not rise."""
        depths = [*by_depth] if by_depth and by_depth[0][0] == 0 else [(0, survival), *by_depth]
        self._survival, self._curves = survival, [curve for _, curve in depths]
        self._starts = np.array([start for start, _ in depths], float)
        if (np.diff(self._starts) <= 0).any():
            raise ValueError(f"by_depth begins at tokens {self._starts.tolist()}: give them in rising order")
        for curve in (survival, *self._curves):
            if not len(curve) or not (curve[0] <= 1 and curve[-1] >= 0 and (np.diff(curve) <= 0).all()):
                fix = "give P(at least 1, 2, ... accepted), from 0 to 1 and never rising"
                raise ValueError(f"accept {[*curve]}: {fix}")

    @classmethod
    def from_length(cls, length: float, k: int) -> "Acceptance":
        """Accept draft position i, given those before it, with probability min(1, a 0.97^(i-1)), where a gives k draft tokens this
        acceptance length. Raises ValueError for a length outside 1 to k + 1."""
        if not 1 <= length <= k + 1:
            raise ValueError(f"acceptance_length [{length}, {k}]: {k} draft tokens give 1 to {k + 1}")
        rates = np.linspace(0.0, 0.97 ** (1 - k), 2001)[:, None] * 0.97 ** np.arange(k)
        curves = np.minimum(1.0, rates).cumprod(1)
        return cls([float(np.interp(length - 1, curves.sum(1), curve)) for curve in curves.T])

    def length(self, k: int) -> float:
        """Tokens that a verification step of k draft tokens emits on average."""
        return 1.0 + float(_extended(self._survival, k).sum())

    def progress(self, most: int) -> tuple[Array, Array, Array]:
        """Return the first response token of each depth [d], and by number of draft tokens two arrays [most + 1, d]: mean tokens
        that a step emits, and by which the last step of a response goes past its end, as in a renewal process."""
        curves = np.stack([_extended(curve, most) for curve in self._curves], axis=1)
        none, positions = np.zeros((1, len(self._curves))), np.arange(1, most + 1)[:, None]
        emitted = 1 + np.vstack([none, curves.cumsum(0)])
        return self._starts, emitted, np.vstack([none, (positions * curves).cumsum(0)]) / emitted


def _extended(curve: Sequence[float], k: int) -> Array:
    """[k] survival. Beyond the known positions, acceptance given all tokens before stays that of the last known one."""
    last, before = ([1.0, *curve][i] for i in (-1, -2))
    rate = last / before if before else 0.0
    return np.array([*curve, *last * rate ** np.arange(1, max(k - len(curve), 0) + 1)][:k])


def generate(cost: StepTimes, acceptance: Acceptance, k: Sequence[int], queues: Ints, prompt_tokens: float) -> Array:
    """Return [engines] seconds until each engine has ended.

    k: draft tokens by batch size, from 0 to the number of slots. queues: [engines, responses] tokens of responses in the order
    in which they begin, then zeros.

    A step advances every running request by the mean number of tokens that are emitted at its depth. A freed slot takes the
    next request, whose prompt is computed first. Without drafts nothing is approximate.
    """
    sizes, drafted, queues = np.arange(1, len(k)).astype(float), np.array(k), np.pad(queues, ((0, 0), (0, 1)))
    bases = {n: np.append(0.0, cost.base(n, sizes)) for n in set(k)}
    base, slope = np.array([bases[n][size] for size, n in enumerate(k)]), np.array([cost.slope(n) for n in k])
    starts, emitted, beyond = acceptance.progress(max(k))
    bounds, prefill = np.append(starts[1:], np.inf), cache(lambda prompts: cost.prefill(prompts * prompt_tokens))
    clock, begun = np.zeros(len(queues)), np.zeros(len(queues), int)
    lengths, done = np.zeros((2, len(queues), len(sizes)))  # of each slot; a slot without a request has length 0
    while True:
        free = lengths == 0
        place = np.minimum(begun[:, None] + free.cumsum(1) - 1, queues.shape[1] - 1)
        new = np.where(free, np.take_along_axis(queues, place, 1), 0)
        lengths, done, admitted = lengths + new, np.where(new > 0, 0.0, done), (new > 0).sum(1)
        begun = begun + admitted
        running = lengths > 0
        batch = running.sum(1)
        if not batch.any():
            return clock
        at = drafted[batch][:, None], np.searchsorted(starts, done, side="right") - 1
        ends = lengths + beyond[at]
        stops = np.minimum(ends, bounds[at[1]])
        needed = np.where(running, np.maximum(stops - done, 0.0) / emitted[at], np.inf)
        steps = np.where(batch > 0, needed.min(1), 0.0)
        advance = np.where(running, emitted[at] * steps[:, None], 0.0)
        read = steps * (running * (prompt_tokens + done)).sum(1) + advance.sum(1) * (steps - 1) / 2
        clock = clock + steps * base[batch] + read * slope[batch] + [prefill(prompts) for prompts in admitted.tolist()]
        done = np.where(needed <= steps[:, None], stops, done + advance)
        lengths = np.where(done < ends, lengths, 0)
