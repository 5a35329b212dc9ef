"""Lengths of responses, and what the learner takes for them."""

import numpy as np
import pytest

from cotrain.config.errors import validated
from cotrain.simulation.roofline import model
from cotrain.simulation.system import WorkloadConfig


def drawn(seed: int = 0, **fields: float) -> np.ndarray:
    return np.array(validated(WorkloadConfig, fields).lengths(seed))


def test_lengths_have_the_stated_mean_spread_and_share_of_the_group() -> None:
    lengths = drawn(prompts=4000, samples=8, mean_length=5000, sigma=0.8, group_share=0.3, limit=10**9)
    assert lengths.shape == (4000, 8) and lengths.dtype == np.int64
    assert lengths.mean() == pytest.approx(5000, rel=0.05)
    logs = np.log(lengths)
    assert logs.std() == pytest.approx(0.8, rel=0.02)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.3, abs=3 / 4000**0.5)


def test_lengths_stay_within_the_limit_and_follow_the_seed() -> None:
    fields = {"prompts": 50, "samples": 4, "mean_length": 100, "sigma": 1.5, "group_share": 1.0, "limit": 300}
    draws = [drawn(seed, **fields) for seed in (0, 0, 1)]
    assert draws[0].min() >= 1 and draws[0].max() == 300
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()
    assert (draws[0] == draws[0][:, :1]).all(), "the samples of a prompt share all of the variance"
    assert (drawn(prompts=3, samples=2, mean_length=100, sigma=0.0) == 100).all()


def test_learner_times_of_a_published_run() -> None:
    """Qwen3-8B on 32 GB200 (arXiv 2604.26779): 31.4 s of training, 17.8 s of log probabilities, with 1024 padded sequences."""
    seconds = model("Qwen3-8B").forward_flops(np.full(1024, 16384.0)) / (32 * 2.5e15)
    assert 3 * seconds / 0.4 == pytest.approx(31.4, rel=0.03) and seconds / 0.25 == pytest.approx(17.8, rel=0.07)


def test_tokens_cost_the_parameters_and_attention_the_square_of_a_sequence() -> None:
    policy = model("Qwen3-8B")
    one, two, long = (policy.forward_flops(np.array(tokens)) for tokens in ([1000.0], [1000.0, 1000.0], [2000.0]))
    assert two == 2 * one > 2 * 2000 * policy.active_parameters
    assert long - two == pytest.approx(4 * 36 * 32 * 128 * 1000**2)
