"""Lengths of responses, and what the learner takes for them."""

import numpy as np
import pytest

from cotrain.simulation.learner import Learner
from cotrain.simulation.lengths import lognormal_lengths, resampled


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


def test_whole_groups_are_drawn_anew_and_all_of_them() -> None:
    groups = [[1, 2], [30], [4, 5, 6]]
    drawn = resampled(groups, 300, seed=0)
    counts = [drawn.count(group) for group in groups]
    assert sum(counts) == len(drawn) == 300 and min(counts) > 70


def test_learner_times_of_a_published_run() -> None:
    """Qwen3-8B on 32 GB200 (arXiv 2604.26779): 31.4 s of training, 17.8 s of log probabilities, with 1024 padded sequences."""
    learner = Learner(8.19e9, 36 * 32 * 128, 32 * 2.5e15, train_mfu=0.43, logprob_mfu=0.25)
    seconds = learner.seconds([16384 - 200] * 1024, 200)
    assert seconds["train"] == pytest.approx(31.4, rel=0.03) and seconds["logprob"] == pytest.approx(17.8, rel=0.03)


def test_packed_sequences_cost_their_own_tokens_and_attention_their_square() -> None:
    whole = Learner(active_parameters=1e9, attention_width=0, flops_per_s=1e12, train_mfu=0.6, logprob_mfu=0.2)
    assert whole.seconds([10, 30], [5, 5]) == pytest.approx({"logprob": 2 * 50 / 200, "train": 6 * 50 / 600})
    attention = Learner(active_parameters=0, attention_width=1e9, flops_per_s=1e12, train_mfu=0.5, logprob_mfu=0.5)
    assert attention.seconds([10], 0)["train"] == pytest.approx(6 * 100 / 500)
    assert attention.seconds([20], 0)["train"] == pytest.approx(4 * attention.seconds([10], 0)["train"])
