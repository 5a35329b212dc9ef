"""Lengths of responses, and what the learner takes for them."""

import numpy as np
import pytest

from cotrain.simulation.roofline import model
from cotrain.simulation.system import lognormal_lengths


def test_lengths_have_the_stated_mean_spread_and_share_of_the_group() -> None:
    lengths = lognormal_lengths(4000, 8, mean=5000, sigma=0.8, group_share=0.3, limit=10**9, seed=0)
    assert lengths.shape == (4000, 8) and lengths.dtype == np.int64
    assert lengths.mean() == pytest.approx(5000, rel=0.05)
    logs = np.log(lengths)
    assert logs.std() == pytest.approx(0.8, rel=0.02)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.3, abs=3 / 4000**0.5)


def test_lengths_stay_within_the_limit_and_follow_the_seed() -> None:
    draws = [lognormal_lengths(50, 4, 100, 1.5, 1.0, 300, seed) for seed in (0, 0, 1)]
    assert draws[0].min() >= 1 and draws[0].max() == 300
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()
    assert (draws[0] == draws[0][:, :1]).all(), "the samples of a prompt share all of the variance"
    assert (lognormal_lengths(3, 2, 100, 0.0, 0.5, 300, 0) == 100).all()


def test_learner_times_of_a_published_run() -> None:
    """Qwen3-8B on 32 GB200 (arXiv 2604.26779): 31.4 s of training, 17.8 s of log probabilities, with 1024 padded sequences."""
    seconds = model("Qwen3-8B").forward_flops(np.full(1024, 16384.0)) / (32 * 2.5e15)
    assert 3 * seconds / 0.4 == pytest.approx(31.4, rel=0.03) and seconds / 0.25 == pytest.approx(17.8, rel=0.07)


def test_tokens_cost_the_parameters_and_attention_the_square_of_a_sequence() -> None:
    policy = model("Qwen3-8B")
    one, two, long = (policy.forward_flops(np.array(tokens)) for tokens in ([1000.0], [1000.0, 1000.0], [2000.0]))
    assert two == 2 * one > 2 * 2000 * policy.active_parameters
    assert long - two == pytest.approx(4 * 36 * 32 * 128 * 1000**2)
