"""Measured on a CPU machine of two cores with SmolLM2-135M (README and docs/trust.md): what tests predict from or compare with."""

from collections.abc import Sequence

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.rollout import Engines
from cotrain.simulation.scenario import Scenario
from cotrain.simulation.step_time import MeasuredCells, StepTime

PLAIN = {1: 21.9e-3, 4: 22.6e-3, 16: 42.6e-3, 32: 75e-3}
"""Seconds of a step without drafts by batch size."""

SPEED = {
    "good": {
        1: {1: 1.24, 4: 1.18, 16: 1.05, 32: 1.02},
        2: {1: 1.44, 4: 1.21, 16: 0.95, 32: 0.92},
        3: {1: 1.47, 4: 1.12, 16: 0.89, 32: 0.75},
    },
    "bad": {
        1: {1: 1.00, 4: 1.00, 16: 0.93, 32: 0.81},
        2: {1: 1.07, 4: 0.91, 16: 0.76, 32: 0.67},
        3: {1: 1.06, 4: 0.85, 16: 0.66, 32: 0.52},
    },
}
"""Decoding speed against no speculation, by drafter, k and batch size."""

ACCEPTANCE_LENGTH = {"good": {1: 1.50, 2: 1.90, 3: 2.08}, "bad": {1: 1.25, 2: 1.33, 3: 1.33}}

DRAINING = {
    "good": {1: (1.10, 0.03), 2: (1.02, 0.04), 3: (0.93, 0.04)},
    "bad": {1: (0.97, 0.02), 2: (0.83, 0.02), 3: (0.71, 0.02)},
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
