"""Survival of draft positions."""

import numpy as np
import pytest

from cotrain.simulation.acceptance import Acceptance


@pytest.mark.parametrize(("length", "k"), [(1.0, 1), (1.5, 1), (2.0, 1), (2.08, 3), (4.0, 3), (1.0, 5), (7.9, 7)])
def test_from_length_has_that_length_and_falls(length: float, k: int) -> None:
    acceptance = Acceptance.from_length(length, k)
    assert acceptance.length(k) == pytest.approx(length, abs=1e-9)
    assert (np.diff(np.append(1.0, acceptance.survival(k))) <= 1e-12).all()


def test_one_curve_goes_through_published_acceptance_lengths() -> None:
    """Qwen3-8B with EAGLE-3 and k = 3, 5, 7 of arXiv 2604.26779."""
    acceptance = Acceptance.from_length(5.06, 7, decay=0.987)
    assert acceptance.length(3) == pytest.approx(3.32, abs=0.03)
    assert acceptance.length(5) == pytest.approx(4.35, abs=0.03)


def test_beyond_the_known_positions_the_last_rate_goes_on() -> None:
    assert Acceptance([0.8, 0.4]).survival(4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert Acceptance([0.5]).survival(3) == pytest.approx([0.5, 0.25, 0.125])
    assert Acceptance([0.6, 0.0]).survival(3) == pytest.approx([0.6, 0.0, 0.0])
    assert Acceptance([0.8, 0.4]).survival(1) == pytest.approx([0.8])
    assert Acceptance([0.8]).length(0) == 1.0
    assert Acceptance([0.8, 0.4]).length() == pytest.approx(2.2)


def test_by_depth_the_overall_curve_holds_where_none_is_given() -> None:
    starts, emitted, _, _ = Acceptance([0.8, 0.4]).progress(2)
    assert starts.tolist() == [0] and emitted == pytest.approx(np.array([[1.0], [1.8], [2.2]]))
    starts, emitted, _, _ = Acceptance([0.8, 0.4], [(100, [0.5]), (900, [0.1])]).progress(2)
    assert starts.tolist() == [0, 100, 900]
    assert emitted == pytest.approx(np.array([[1, 1, 1], [1.8, 1.5, 1.1], [2.2, 1.75, 1.11]]))
    assert Acceptance([0.8], [(0, [0.5])]).progress(1)[1].tolist() == [[1.0], [1.5]]


def test_steps_spread_and_end_beyond_a_response_as_many_drawn_ones_do() -> None:
    curve = np.array([0.7, 0.42, 0.3])
    numbers = np.random.default_rng(0).random((20_000, 100))
    tokens = 1 + sum((numbers < rate).astype(int) for rate in curve)
    _, emitted, spread, beyond = Acceptance(curve.tolist()).progress(3)
    assert tokens.mean() == pytest.approx(emitted[3, 0], rel=0.01)
    assert tokens.var() / tokens.mean() == pytest.approx(spread[3, 0], rel=0.01)
    reached = tokens.cumsum(1)
    ends = np.take_along_axis(reached, (reached >= 100).argmax(1)[:, None], axis=1)
    assert ends.mean() - 100 == pytest.approx(beyond[3, 0], rel=0.03)


@pytest.mark.parametrize("survival", [[], [1.1], [0.5, 0.6], [0.5, -0.1], [float("nan")], [0.5, float("nan")]])
def test_impossible_survival_is_refused(survival: list[float]) -> None:
    with pytest.raises(ValueError, match=r"drafter\.accept.*from 0 to 1 and never rising"):
        Acceptance(survival)
    with pytest.raises(ValueError, match="by_depth at token 7"):
        Acceptance([0.5], [(7, survival)])


def test_impossible_depths_and_lengths_are_refused() -> None:
    for depths in ((5, 5), (9, 5), (-1,)):
        with pytest.raises(ValueError, match="rising order"):
            Acceptance([0.5], [(start, [0.5]) for start in depths])
    for length, k in ((0.9, 3), (4.1, 3), (1.0, 0)):
        with pytest.raises(ValueError, match="acceptance_length"):
            Acceptance.from_length(length, k)
