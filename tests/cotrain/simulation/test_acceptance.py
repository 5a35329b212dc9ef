"""Survival of draft positions."""

import numpy as np
import pytest

from cotrain.simulation.generation import Acceptance


@pytest.mark.parametrize(("length", "k"), [(1.0, 1), (1.5, 1), (2.0, 1), (2.08, 3), (4.0, 3), (1.0, 5), (7.9, 7)])
def test_from_length_has_that_length_and_falls(length: float, k: int) -> None:
    acceptance = Acceptance.from_length(length, k)
    assert acceptance.length(k) == pytest.approx(length, abs=1e-9)
    gains = np.diff([acceptance.length(n) for n in range(k + 1)])
    assert (np.diff(gains) <= 1e-12).all() and gains[0] <= 1


def test_other_draft_lengths_are_told_from_one() -> None:
    """Qwen3-8B with EAGLE-3 and k = 3, 5, 7 of arXiv 2604.26779, Zero and Think."""
    for lengths in ([3.32, 4.35, 5.06], [2.77, 3.23, 3.48]):
        found = [Acceptance.from_length(lengths[0], 3).length(k) for k in (3, 5, 7)]
        assert found == pytest.approx(lengths, rel=0.05)


def test_beyond_the_known_positions_the_last_rate_goes_on() -> None:
    assert Acceptance([0.8, 0.4]).length(4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)
    assert Acceptance([0.5]).length(3) == pytest.approx(1.875)
    assert Acceptance([0.6, 0.0]).length(3) == pytest.approx(1.6)
    assert Acceptance([0.8]).length(0) == 1.0


def test_by_depth_the_overall_curve_holds_where_none_is_given() -> None:
    starts, emitted, _ = Acceptance([0.8, 0.4], [(100, [0.5]), (900, [0.1])]).progress(2)
    assert starts.tolist() == [0, 100, 900]
    assert emitted == pytest.approx(np.array([[1, 1, 1], [1.8, 1.5, 1.1], [2.2, 1.75, 1.11]]))
    assert Acceptance([0.8], [(0, [0.5])]).progress(1)[1].tolist() == [[1.0], [1.5]]


def test_the_last_step_goes_beyond_an_end_as_drawn_ones_do() -> None:
    numbers, curve = np.random.default_rng(0).random((20_000, 100)), [0.7, 0.42, 0.3]
    reached = (1 + sum((numbers < rate).astype(int) for rate in curve)).cumsum(1)
    ends = np.take_along_axis(reached, (reached >= 100).argmax(1)[:, None], axis=1)
    assert ends.mean() - 100 == pytest.approx(Acceptance(curve).progress(3)[2][3, 0], rel=0.03)


@pytest.mark.parametrize("survival", [[], [1.1], [0.5, 0.6], [0.5, -0.1], [float("nan")], [0.5, float("nan")]])
def test_impossible_survival_is_refused(survival: list[float]) -> None:
    for arguments in ((survival,), ([0.5], [(7, survival)])):
        with pytest.raises(ValueError, match="from 0 to 1 and never rising"):
            Acceptance(*arguments)


def test_impossible_depths_and_lengths_are_refused() -> None:
    for depths in ((5, 5), (9, 5), (-1,)):
        with pytest.raises(ValueError, match="rising order"):
            Acceptance([0.5], [(start, [0.5]) for start in depths])
    for length in (0.9, 4.1):
        with pytest.raises(ValueError, match="3 draft tokens give 1 to 4"):
            Acceptance.from_length(length, 3)
