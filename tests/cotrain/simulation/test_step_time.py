"""Step times between and beyond the measured cells."""

import numpy as np
import pytest

from cotrain.simulation.step_time import MeasuredCells

POWER = {(k, batch): (1 + k) * batch**0.5 for k in (0, 2) for batch in (2, 8, 32)}
"""A law that interpolation linear in k and in logs over log batch follows everywhere."""


def seconds(cost: MeasuredCells, k: int, batch: float) -> float:
    return cost.base(k, np.array([batch])).item()


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("batch", [2, 3, 8, 20, 32])
def test_interpolation_is_exact_for_a_power_of_the_batch(k: int, batch: int) -> None:
    cost = MeasuredCells(POWER)
    assert seconds(cost, k, batch) == pytest.approx((1 + k) * batch**0.5)
    assert cost.covers(k, batch) == (k <= 2)


def test_beyond_the_largest_batch_an_affine_law_goes_on_whatever_the_noise_of_close_cells() -> None:
    cost = MeasuredCells({(0, 2): 12.0, (0, 4): 14.0, (0, 7): 16.0, (0, 8): 18.0})
    assert [seconds(cost, 0, batch) for batch in (1, 8, 16, 32)] == pytest.approx([12.0, 18.0, 26.0, 42.0])
    assert cost.covers(0, 2) and cost.covers(0, 8) and not cost.covers(0, 1) and not cost.covers(0, 9)
    falling = MeasuredCells({(0, 1): 1.0, (0, 4): 0.9})
    assert seconds(falling, 0, 64) == pytest.approx(0.9)


def test_between_draft_lengths_both_neighbours_must_cover_the_batch() -> None:
    cost = MeasuredCells({(0, 1): 1.0, (0, 64): 1.0, (4, 1): 2.0, (4, 8): 3.0})
    assert cost.covers(0, 64) and cost.covers(4, 8) and cost.covers(2, 8)
    assert not cost.covers(2, 9) and not cost.covers(4, 9)


def test_noise_never_makes_a_step_with_drafts_cheaper_than_one_without() -> None:
    """Measured at the start of a run on a busy machine: with k = 0, 1, 2, 3 and one request 236, 227, 194, 224 ms."""
    cost = MeasuredCells({(0, 1): 0.236, (1, 1): 0.227, (2, 1): 0.194, (3, 1): 0.224, (0, 8): 0.3, (3, 8): 0.5})
    for batch in (1.0, 3.0, 8.0, 20.0):
        times = [seconds(cost, k, batch) for k in range(8)]
        assert times == sorted(times)
    assert seconds(cost, 3, 1) == pytest.approx(0.224), "what is not contradicted stays as it was measured"


def test_prompts_cost_what_the_rate_says_and_nothing_without_one() -> None:
    assert MeasuredCells(POWER, prefill_tokens_per_s=200).prefill(50) == pytest.approx(0.25)
    assert MeasuredCells(POWER).prefill(50) == 0


@pytest.mark.parametrize(("lengths", "asked"), [((0,), 2), ((1, 3), 0)])
def test_a_draft_length_that_the_cells_do_not_tell_is_refused(lengths: tuple[int, ...], asked: int) -> None:
    with pytest.raises(ValueError, match="cells of its own"):
        MeasuredCells({(k, 1): 1.0 for k in lengths}).base(asked, np.ones(1))
