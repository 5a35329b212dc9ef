"""Each check alone: what it is sure of, what its effect means, what it refuses."""

import numpy as np
import pytest
import torch
from scipy import stats

from cotrain.lossless.draws import draws_of, members_first
from cotrain.lossless.goodness import (
    ks_distance,
    log_prob_check,
    returned_log_prob_check,
    support_check,
    transformed,
    uniformity_check,
)
from tests.cotrain.lossless.all_checks import all_checks


def drawn(law, num, seed, actual=None, orders=None):
    """num tokens drawn from `actual`, under `law`."""
    p = torch.tensor(law, dtype=torch.float64).repeat(num, 1)
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.choice(len(law), size=num, p=actual or law))
    return draws_of(p.log(), tokens, orders), rng


LAW = [0.1, 0.4, 0.2, 0.3]


def test_moments_and_orders():
    log_law = torch.tensor([LAW], dtype=torch.float64).log()
    draws = draws_of(log_law, torch.tensor([2]), {"odd first": members_first([1, 3], 4)})
    log_p = np.log(LAW)
    assert draws.mean == pytest.approx(LAW @ log_p)
    assert draws.variance == pytest.approx(LAW @ (log_p - draws.mean) ** 2)
    assert draws.third_moment == pytest.approx(LAW @ (log_p - draws.mean) ** 3)
    assert draws.before["probability"] == pytest.approx(0.7)
    assert draws.before["odd first"] == pytest.approx(0.7)
    assert draws_of(log_law, torch.tensor([1]), {"even": members_first([0, 2], 4)}).before["even"] == pytest.approx(0.3)


def test_tokens_of_equal_probability_come_by_id():
    log_law = torch.full((4, 4), 0.25, dtype=torch.float64).log()
    assert draws_of(log_law, torch.arange(4)).before["probability"].tolist() == [0, 0.25, 0.5, 0.75]


def test_the_transform_is_uniform_whatever_the_laws():
    rng = np.random.default_rng(0)
    p = torch.from_numpy(rng.dirichlet(np.full(6, 0.3), size=4000))
    tokens = torch.from_numpy((rng.random((4000, 1)) > p.numpy().cumsum(1)).sum(1).clip(max=5))
    for order in ("probability", "even first"):
        u = transformed(draws_of(p.log(), tokens, {"even first": members_first([0, 2, 4], 6)}), rng, order)
        assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert ks_distance(u) == pytest.approx(stats.kstest(u, "uniform").statistic)


def test_one_impossible_token_is_proof():
    log_law = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64).log().log_softmax(1).repeat(1000, 1)
    tokens = torch.zeros(1000, dtype=torch.int64)
    tokens[7] = 2
    draws = draws_of(log_law, tokens)
    result = support_check(draws, "")
    assert (result.p, result.statistic, result.effect) == (0.0, 1, 0.001)
    assert np.isfinite(draws.log_prob).all()
    explained = draws_of(log_law, tokens, outside=torch.zeros(1000, dtype=torch.bool))
    assert support_check(explained, "").p == 1.0


def test_effect_of_a_sharper_law_is_its_total_variation_distance():
    draws, rng = drawn(LAW, 50_000, 1, actual=[0.05, 0.55, 0.15, 0.25])
    result = uniformity_check(draws, "", rng)
    assert result.effect == pytest.approx(0.15, abs=0.01)
    assert result.p < 1e-100


def test_an_order_finds_what_the_one_by_probability_misses():
    """Mass moved between tokens of one probability, from those outside a draft vocabulary to those in it."""
    key = members_first([1, 3], 4)
    draws, rng = drawn([0.25] * 4, 4000, 2, actual=[0.2, 0.3, 0.2, 0.3], orders={"draft vocabulary": key})
    assert uniformity_check(draws, "", rng, "draft vocabulary").effect == pytest.approx(0.1, abs=0.03)
    assert uniformity_check(draws, "", rng).effect < 0.07


@pytest.mark.parametrize(("actual", "sign"), [([0.05, 0.55, 0.15, 0.25], 1), ([0.25] * 4, -1)])
def test_sharper_and_flatter_have_a_sign(actual, sign):
    draws, _ = drawn(LAW, 3000, 3, actual=actual)
    result = log_prob_check(draws, "")
    expected = (np.array(actual) - LAW) @ np.log(LAW)
    assert result.effect == pytest.approx(expected, abs=0.04)
    assert np.sign(result.statistic) == sign
    assert result.p < 1e-10


def test_skewed_log_probs_keep_the_stated_rate_far_out():
    """A token of probability 0.01 among 300: the normal tail would raise ten times the alarms."""
    num, law, level = 300, np.array([0.01, 0.99]), 1e-4
    table = draws_of(torch.from_numpy(law).log().expand(2, 2), torch.arange(2))
    alarms = normal_alarms = 0.0
    for rare in range(num + 1):
        result = log_prob_check(table.select(np.repeat([0, 1], [rare, num - rare])), "")
        chance = stats.binom.pmf(rare, num, law[0])
        alarms += chance * (result.p <= level)
        normal_alarms += chance * (2 * stats.norm.sf(abs(result.statistic)) <= level)
    assert alarms <= level
    assert normal_alarms > 5 * level


def test_greedy_laws_have_no_spread_to_test():
    log_law = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64).repeat(5, 1)
    found = all_checks(draws_of(log_law, torch.zeros(5, dtype=torch.int64)), "", np.random.default_rng(0))
    assert {r.check for r in found} == {"support", "log-prob", "uniformity by probability"}
    assert next(r for r in found if r.check == "log-prob").p == 1.0


@pytest.mark.parametrize(("error", "p"), [(1e-4, 1.0), (1e-2, 0.0), (np.nan, 0.0)])
def test_returned_log_probs_are_the_laws(error, p):
    draws, _ = drawn(LAW, 10, 5)
    returned = draws.log_prob.copy()
    returned[3] += error
    assert returned_log_prob_check(returned, draws, "", tolerance=1e-3).p == p


def test_bad_input_is_refused():
    draws, rng = drawn(LAW, 10, 6)
    log_law = torch.tensor([LAW], dtype=torch.float64).log()
    with pytest.raises(ValueError, match="nothing to test"):
        support_check(draws.select(np.zeros(10, bool)), "")
    with pytest.raises(ValueError, match="not one of"):
        uniformity_check(draws, "", rng, "alphabet")
    with pytest.raises(ValueError, match="9 returned"):
        returned_log_prob_check(draws.log_prob[:9], draws, "", 1e-3)
    with pytest.raises(ValueError, match="sum to 1"):
        draws_of(log_law + 1, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"must be 0\.\.3"):
        draws_of(log_law, torch.tensor([4]))
    with pytest.raises(ValueError, match="give one a row"):
        draws_of(log_law, torch.tensor([0, 1]))
