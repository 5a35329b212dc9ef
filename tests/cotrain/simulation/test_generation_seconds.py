"""Generation without drawing against the event loop, and the best k by batch size."""

from itertools import pairwise

import numpy as np
import pytest

from cotrain.rollout.speculation.step_costs import StepCosts
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.rollout import Engines, Order, generate
from cotrain.simulation.scenario import Scenario, generation_seconds
from cotrain.simulation.step_time import MeasuredCells
from tests.cotrain.simulation.cpu_cells import best_lengths, step_seconds

CELLS = {(0, 1): 10e-3, (0, 64): 20e-3, (1, 1): 11e-3, (1, 64): 25e-3, (3, 1): 14e-3, (3, 64): 35e-3}
COST = MeasuredCells(CELLS, prefill_tokens_per_s=20_000, slope=2e-7)
ALWAYS, HALF = Acceptance([1.0]), Acceptance.from_length(2.5, 3)


def undrawn(lengths: list[int], prompt: int, engines: int, k: int | list[int], acceptance: Acceptance | None,
            order: Order = "drawn", samples: int = 1) -> float:  # fmt: skip
    """Seconds without drawing, with slots for all."""
    groups = [lengths[i : i + samples] for i in range(0, len(lengths), samples)]
    return generation_seconds(Scenario(COST, Engines(engines, 64), groups, prompt, acceptance, k, order=order))


def event(lengths: list[int], prompt: int, engines: int, k: int | list[int], acceptance: Acceptance | None,
          seeds: int = 1, order: Order = "drawn", samples: int = 1) -> float:  # fmt: skip
    """Mean seconds of the event loop with slots for all."""
    where = Engines(engines, 64)
    runs = [generate(COST, lengths, prompt, where, k, acceptance, seed, order, samples) for seed in range(seeds)]
    return float(np.mean([run.seconds for run in runs]))


@pytest.mark.parametrize("order", ["drawn", "longest_first"])
@pytest.mark.parametrize(("engines", "samples"), [(1, 1), (3, 1), (3, 8), (40, 1)])
def test_exact_without_drafts(engines: int, samples: int, order: Order) -> None:
    lengths = np.random.default_rng(0).integers(1, 3000, 40).tolist()
    found = undrawn(lengths, 300, engines, 0, None, order, samples)
    assert found == pytest.approx(event(lengths, 300, engines, 0, None, order=order, samples=samples), rel=1e-12)


@pytest.mark.parametrize("k", [1, 3])
def test_exact_for_constant_lengths_whose_drafts_are_always_accepted(k: int) -> None:
    lengths = [400 * (k + 1)] * 12
    for by_batch in (k, [k] * 13 + [0] * 52):
        found = undrawn(lengths, 100, 2, by_batch, ALWAYS)
        assert found == pytest.approx(event(lengths, 100, 2, by_batch, ALWAYS), rel=1e-12)


def test_with_drafts_the_event_loop_is_slower_by_less_the_longer_the_responses() -> None:
    """Last steps are not used to the full, and of requests of the same length some need more steps than others."""
    gaps = [
        event([length] * 8, 0, 1, 3, HALF, seeds=20) / undrawn([length] * 8, 0, 1, 3, HALF) - 1
        for length in (10, 100, 1000, 10_000, 100_000)
    ]
    assert all(gap > 0 for gap in gaps[:4]) and gaps[0] > 0.05 and abs(gaps[-1]) < 0.004
    assert all(later < 0.7 * earlier for earlier, later in pairwise(gaps))


def test_with_drafts_draining_batches_of_long_responses_agree() -> None:
    """With k by batch size and acceptance by depth as well."""
    lengths = np.clip(np.random.default_rng(1).lognormal(8, 1, 64), 1, 16_000).astype(int).tolist()
    falling = Acceptance([0.7, 0.5], [(0, [0.9, 0.8]), (1000, [0.6, 0.3]), (5000, [0.2, 0.1])])
    by_batch = [3] * 8 + [1] * 24 + [0] * 33
    for k, acceptance in ((3, HALF), (3, falling), (by_batch, falling)):
        found = undrawn(lengths, 200, 2, k, acceptance)
        assert found == pytest.approx(event(lengths, 200, 2, k, acceptance, seeds=4), rel=0.01)


@pytest.mark.parametrize(("k_max", "best"), [(0, {0}), (1, {0, 1}), (3, {0, 1, 2, 3})])
def test_best_lengths_are_those_that_the_controller_of_the_engines_would_choose(k_max: int, best: set[int]) -> None:
    cells = {(k, batch): step_seconds("good", k, batch) for k in range(4) for batch in (1, 4, 16)}
    acceptance = Acceptance([0.32, 0.22, 0.15])
    found = best_lengths(MeasuredCells(cells), acceptance, k_max, 16, mean_context=0)
    tokens = np.array([acceptance.length(k) for k in range(k_max + 1)])
    ratios = StepCosts(3, 16, {cell: [seconds] for cell, seconds in cells.items()}).ratios()[: k_max + 1]
    assert found[1:] == (tokens[:, None] / ratios).argmax(0).tolist() and len(found) == 17
    assert set(found) == best


def test_a_long_context_makes_drafts_pay_where_a_short_one_does_not() -> None:
    """A step that mostly reads its context costs the same with drafts; nothing pays without acceptance."""
    acceptance = Acceptance([0.3])
    assert best_lengths(COST, acceptance, 1, 64, mean_context=0)[64] == 1
    costly = MeasuredCells(CELLS | {(1, 64): 40e-3}, slope=2e-7)
    assert best_lengths(costly, acceptance, 1, 64, mean_context=0)[64] == 0
    assert best_lengths(costly, acceptance, 1, 64, mean_context=20_000)[64] == 1
    assert best_lengths(COST, None, 3, 4, 0) == best_lengths(COST, Acceptance([0.0]), 3, 4, 0) == [0] * 5
