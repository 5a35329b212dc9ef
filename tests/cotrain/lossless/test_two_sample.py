"""With against without speculation: an exact rate of false alarms, and bugs found without any law."""

import numpy as np
import pytest
from scipy import stats

from cotrain.lossless.two_sample import two_sample_check
from tests.cotrain.lossless.conftest import MODEL
from tests.cotrain.lossless.simulated_sampler import Setting, sample_plainly, speculate

PROMPTS = (3, 17)
TOKENS = 3


def texts(setting, samples, rng, bug=None):
    """Both arms: [prompt][sample][token]."""
    runs = [speculate(MODEL, setting, samples, TOKENS, rng, bug, first=first) for first in PROMPTS]
    speculated = [run.token.reshape(samples, TOKENS).tolist() for run in runs]
    plain = [sample_plainly(MODEL, setting, first, samples, TOKENS, rng) for first in PROMPTS]
    return speculated, plain


@pytest.mark.parametrize(
    ("bug", "setting", "samples"),
    [
        ("temperatures from uninitialised memory", Setting(), 1500),
        ("recovered token from p", Setting(), 1500),
        ("typical acceptance", Setting(drafts="greedy", temperature=0.7), 500),
    ],
)
def test_a_planted_bug_is_caught(bug, setting, samples):
    rng = np.random.default_rng(0)
    result = two_sample_check(*texts(setting, samples, rng, bug), "", rng, depth=TOKENS, permutations=999)
    assert result.p == 1 / 1000
    assert result.effect > 0.02
    assert result.num == 2 * 2 * samples


def test_p_values_of_a_clean_sampler_are_uniform():
    """Few texts and many cells, where a chi-square table would not do."""
    rng = np.random.default_rng(1)
    found = [
        two_sample_check(*texts(Setting(k=2), 30, rng), "", rng, depth=TOKENS, rare=3, permutations=99)
        for _ in range(200)
    ]
    p = np.array([result.p for result in found]) - rng.random(200) / 100  # ties of the 100 possible values
    assert stats.kstest(p, "uniform").pvalue > 1e-3
    assert abs(np.mean([result.effect for result in found])) < 0.01


def test_arms_may_differ_in_size():
    rng = np.random.default_rng(2)
    speculated, plain = texts(Setting(), 400, rng)
    speculated[0] = speculated[0][:100]
    assert two_sample_check(speculated, plain, "", rng, permutations=199).p > 0.005


def test_a_text_that_ends_early_is_a_difference():
    rng = np.random.default_rng(3)
    assert two_sample_check([[[1, 2]] * 50], [[[1]] * 50], "", rng, permutations=199).p == 1 / 200


def test_a_deterministic_engine_gives_nothing_to_compare():
    rng = np.random.default_rng(4)
    with pytest.raises(ValueError, match="no prefix"):
        two_sample_check([[[1, 2]] * 50], [[[1, 2]] * 50], "", rng)
    with pytest.raises(ValueError, match="same prompts"):
        two_sample_check([[[1]]], [], "", rng)
    with pytest.raises(ValueError, match="at least one text"):
        two_sample_check([[]], [[[1]]], "", rng)
