"""How many draft tokens a verification step accepts: the survival of each draft position, also by depth in the response."""

from collections.abc import Sequence

import numpy as np

from cotrain.simulation.step_time import Array


class Acceptance:
    """Survival by draft position: the share of drafts of which at least j tokens are accepted."""

    def __init__(self, survival: Sequence[float], by_depth: Sequence[tuple[int, Sequence[float]]] = ()):
        """survival: of draft positions 1, 2, ... by_depth: (first response token, survival from there on), ascending.

        Raises ValueError for a survival that is empty, rises or leaves 0 to 1, and for depths that do not rise.
        """
        self._survival = _checked(survival, "drafter.accept")
        starts = [start for start, _ in by_depth]
        if any(later <= earlier for earlier, later in zip([-1, *starts], starts, strict=False)):
            raise ValueError(f"drafter.by_depth begins at tokens {starts}: give them in rising order from 0 on")
        self._by_depth = [(start, _checked(curve, f"drafter.by_depth at token {start}")) for start, curve in by_depth]
        if not starts or starts[0] > 0:
            self._by_depth.insert(0, (0, self._survival))

    @classmethod
    def from_length(cls, length: float, k: int, decay: float = 0.97) -> "Acceptance":
        """Accept draft position i, given that all before it were, with probability min(1, a decay^(i-1)).

        a is chosen so that k draft tokens give this acceptance length. Raises ValueError for a length outside 1 to k + 1.
        """
        if k < 1 or not 1 <= length <= k + 1:
            raise ValueError(f"drafter.acceptance_length: {length} with k = {k}; give 1 to k + 1, and k from 1 on")
        from scipy.optimize import brentq

        def survival(a: float) -> Array:
            return np.cumprod(np.minimum(1.0, a * decay ** np.arange(k)))

        return cls(survival(brentq(lambda a: 1 + survival(a).sum() - length, 0.0, 2 * decay ** (1 - k))).tolist())

    def survival(self, k: int) -> Array:
        """[k] survival. Beyond the known positions, acceptance given all tokens before stays that of the last known one."""
        return _extended(self._survival, k)

    def length(self, k: int | None = None) -> float:
        """Tokens that a verification step of k draft tokens, or of all known positions, emits on average."""
        return 1.0 + float(self.survival(len(self._survival) if k is None else k).sum())

    def progress(self, most: int) -> tuple[Array, Array, Array, Array]:
        """Return the first response token of each depth [d], from 0 on, and three arrays [most + 1, d] by number of draft tokens:

        mean tokens that a step emits there, their variance over that mean, and mean tokens by which the last step of a
        response goes past its end, as in a renewal process.
        """
        starts = np.array([start for start, _ in self._by_depth], float)
        curves = np.stack([_extended(curve, most) for _, curve in self._by_depth], axis=1)
        none, positions = np.zeros((1, len(starts))), np.arange(1, most + 1)[:, None]
        accepted = np.vstack([none, curves.cumsum(0)])
        weighted = np.vstack([none, (positions * curves).cumsum(0)])
        emitted = 1 + accepted
        return starts, emitted, np.maximum(2 * weighted - accepted * emitted, 0.0) / emitted, weighted / emitted


def _checked(survival: Sequence[float], name: str) -> Array:
    curve = np.asarray(survival, float)
    if not len(curve) or not (curve[0] <= 1 and curve[-1] >= 0 and (np.diff(curve) <= 0).all()):
        raise ValueError(f"{name} {curve.tolist()}: give P(at least 1, 2, ... accepted), from 0 to 1 and never rising")
    return curve


def _extended(curve: Array, k: int) -> Array:
    before = curve[-2] if len(curve) > 1 else 1.0
    rate = curve[-1] / before if before else 0.0
    return np.concatenate([curve, curve[-1] * rate ** np.arange(1, max(k - len(curve), 0) + 1)])[:k]
