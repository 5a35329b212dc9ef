"""Steps whose generation runs ahead of the learner."""

from itertools import pairwise

import numpy as np
import pytest

from cotrain.simulation.scenario import schedule


def noisy(mean: float, spread: float, seed: int, count: int = 200) -> np.ndarray:
    return mean * np.exp(spread * np.random.default_rng(seed).standard_normal(count))


def test_lag_zero_is_synchronous() -> None:
    generation, learning = noisy(100, 0.3, 0), noisy(60, 0.2, 1)
    found = schedule(generation, learning, 0)
    assert found.step_seconds == pytest.approx(np.mean(generation + learning))
    assert found.exposed_generation == pytest.approx(np.mean(generation))


@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize(("generation", "learning"), [(75.0, 64.6), (50.0, 64.6), (60.0, 60.0)])
def test_with_lag_a_step_takes_as_long_as_the_slower_side(lag: int, generation: float, learning: float) -> None:
    """75.0 s of which 10.4 exposed is the row without speculation of arXiv 2604.26779 at lag 1."""
    for count in (1, 7):
        found = schedule(np.full(count, generation), np.full(count, learning), lag)
        assert found.step_seconds == pytest.approx(max(generation, learning))
        assert found.exposed_generation == pytest.approx(max(0, generation - learning))


def test_a_lag_carries_just_so_many_steps_ahead() -> None:
    """By hand: one slow generation in four. With lag L the learner has L finished steps to go on with, of 1 s each."""
    generation, learning = np.array([4.0, 0.0, 0.0, 0.0]), np.ones(4)
    assert [schedule(generation, learning, lag).exposed_generation * 4 for lag in range(6)] == [4, 3, 2, 1, 0, 0]
    assert [schedule(generation, learning, lag).step_seconds * 4 for lag in range(6)] == [8, 7, 6, 5, 4, 4]


@pytest.mark.parametrize("seed", range(6))
def test_more_lag_is_never_slower_and_tends_to_the_slower_side(seed: int) -> None:
    generation, learning = noisy(100, 0.1, seed), noisy((80, 100, 120)[seed % 3], 0.1, seed + 50)
    slower = max(generation.mean(), learning.mean())
    steps = [schedule(generation, learning, lag).step_seconds for lag in range(40)]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(steps))
    assert steps[1] > steps[-1] == pytest.approx(slower, rel=1e-3)
