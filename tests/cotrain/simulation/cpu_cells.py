"""Measured on a CPU machine of two cores with SmolLM2-135M (cotrain/simulation/data/cpu.toml): what tests predict from or
compare with."""

from collections.abc import Sequence

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.roofline import tables
from cotrain.simulation.scenario import Engines, Scenario
from cotrain.simulation.step_time import MeasuredCells, StepTime

_DATA = tables("cpu")
_EARLIER = _DATA["earlier"]

PLAIN: dict[int, float] = dict(zip(_DATA["seconds"]["batch"], _DATA["seconds"]["without"], strict=True))
"""Seconds of a step without drafts by batch size."""

SPEED: dict[str, dict[int, dict[int, float]]] = {
    drafter: {k: dict(zip(_EARLIER["batch"], row, strict=True)) for k, row in enumerate(rows, 1)}
    for drafter, rows in _EARLIER["speed"].items()
}
"""Decoding speed against no speculation, by drafter, k and batch size."""

ACCEPTANCE_LENGTH: dict[str, dict[int, float]] = {
    drafter: dict(enumerate(_DATA["acceptance"][drafter], 1)) for drafter in SPEED
}

DRAINING: dict[str, dict[int, tuple[float, float]]] = {
    drafter: dict(enumerate(zip(_EARLIER["drain"][drafter], _EARLIER["drain_error"][drafter], strict=True), 1))
    for drafter in SPEED
}
"""The same of a batch of 16 of which one response after the other ends, with its standard error."""

DRAINING_LENGTHS = [4 * (i + 1) for i in range(16)]


def step_seconds(drafter: str, k: int, batch: int) -> float:
    return PLAIN[batch] * (ACCEPTANCE_LENGTH[drafter][k] / SPEED[drafter][k][batch] if k else 1.0)


def cells_of(drafter: str, k: int) -> MeasuredCells:
    """Those of no speculation and of k."""
    return MeasuredCells(
        {(length, batch): step_seconds(drafter, length, batch) for length in (0, k) for batch in PLAIN}
    )


def best_lengths(
    cost: StepTime, acceptance: Acceptance | None, k_max: int, slots: int, mean_context: int
) -> Sequence[int]:
    """Draft lengths by batch size that a scenario chooses whose requests have this context, and half a token more."""
    chosen = Scenario(cost, Engines(1, slots), [[1]], mean_context, acceptance, 0).adaptive(k_max).k
    assert not isinstance(chosen, int)
    return chosen
