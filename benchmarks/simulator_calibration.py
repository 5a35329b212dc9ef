"""Constants of a roofline that make measured rows come out.

A row without speculation tells how long responses are, and nothing of what a draft pass costs. One drafted row tells that,
and one that left the CUDA graphs what a step outside of them takes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cotrain.simulation.roofline import Roofline


def solve(name: str, predict: Callable[[float], float], measured: float, low: float, high: float) -> float:
    """The value between low and high at which predict(value), which rises or falls, is what was measured.

    Raises ValueError when there is none, with what low and high give.
    """
    from scipy.optimize import brentq

    ends = predict(low), predict(high)
    if not min(ends) <= measured <= max(ends):
        raise ValueError(
            f"no {name} from {low:g} to {high:g} gives the measured {measured:g}: they give {ends[0]:.4g} and {ends[1]:.4g}. "
            "Check the row, and that the workload is the one it was measured with"
        )
    return float(brentq(lambda value: predict(value) - measured, low, high, rtol=1e-4))


def fit_host(cost: Roofline, constant: str, speedup: Callable[[Roofline], float], measured: float) -> Roofline:
    """cost with such a constant of its host (draft_s, eager_layer_s) that speedup(cost), of a drafted row, is as measured.

    Raises ValueError where none gives it.
    """

    def changed(value: float) -> Roofline:
        constants: dict[str, Any] = {constant: value, "source": "fitted to a drafted row"}
        return replace(cost, hardware=replace(cost.hardware, host=replace(cost.host, **constants)))

    return changed(solve(f"host.{constant}", lambda value: speedup(changed(value)), measured, 0.0, 20e-3))
