"""Sample sizes keep their promise, and do not promise far too little."""

import numpy as np
import pytest
import torch

from cotrain.lossless import power
from cotrain.lossless.draws import draws_of
from cotrain.lossless.goodness import log_prob_check, uniformity_check
from cotrain.lossless.two_sample import two_sample_check

LEVEL = power.level_of_check(0.01, 20)
LAW = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
SHARPER = LAW + np.array([0.06, 0, -0.02, -0.02, -0.02])
RUNS = 40


def caught(num, check, actual=SHARPER):
    """Share of runs of num tokens in which the check finds that they come from `actual`, not LAW."""
    rng = np.random.default_rng(0)
    table = draws_of(torch.from_numpy(LAW).log().expand(5, 5), torch.arange(5))
    runs = (table.select(rng.choice(5, size=num, p=actual)) for _ in range(RUNS))
    return np.mean([check(draws, rng).p <= LEVEL for draws in runs])


def test_tokens_for_a_distance():
    num = power.tokens_for_distance(0.06, LEVEL)
    assert caught(num, lambda draws, rng: uniformity_check(draws, "", rng)) >= 0.85
    assert caught(num // 3, lambda draws, rng: uniformity_check(draws, "", rng)) < 0.6
    assert power.detectable_distance(num, LEVEL) == pytest.approx(0.06, rel=1e-3)


def test_tokens_for_a_log_prob_shift():
    mean = LAW @ np.log(LAW)
    deviation = (LAW @ (np.log(LAW) - mean) ** 2) ** 0.5
    num = power.tokens_for_log_prob_shift((SHARPER - LAW) @ np.log(LAW), deviation, LEVEL)
    assert 0.8 <= caught(num, lambda draws, rng: log_prob_check(draws, "")) <= 1
    assert caught(num // 3, lambda draws, rng: log_prob_check(draws, "")) < 0.6


def test_texts_for_two_samples():
    rng = np.random.default_rng(1)
    num = power.texts_for_two_sample(0.06, 5, level=0.01)
    arms = [[[[int(t)] for t in rng.choice(5, size=num, p=p)]] for _ in range(20) for p in (SHARPER, LAW)]
    p = [
        two_sample_check(a, b, "", rng, depth=1, permutations=power.permutations_for_level(0.01)).p
        for a, b in zip(arms[::2], arms[1::2], strict=True)
    ]
    assert np.mean(np.array(p) <= 0.01) >= 0.75
    assert power.texts_for_two_sample(0.03, 5, 0.01) == pytest.approx(4 * num, rel=0.01)


def test_smaller_effects_need_more():
    assert power.tokens_for_distance(0.01, LEVEL) == pytest.approx(9 * power.tokens_for_distance(0.03, LEVEL), rel=1e-3)
    assert power.tokens_for_distance(0.03, LEVEL / 10) > power.tokens_for_distance(0.03, LEVEL)
    assert power.tokens_for_distance(0.03, LEVEL, power=0.99) > power.tokens_for_distance(0.03, LEVEL)
    assert power.detectable_distance(1, LEVEL) == 1.0


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="effect 0"):
        power.tokens_for_distance(0, LEVEL)
    with pytest.raises(ValueError, match="cells is 1"):
        power.texts_for_two_sample(0.1, 1, LEVEL)
    with pytest.raises(ValueError, match="num_checks 0"):
        power.level_of_check(0.01, 0)
