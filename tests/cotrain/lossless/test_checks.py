"""Each check alone: what it is sure of, what its effect means, and how many tokens it takes."""

import asyncio
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from cotrain.lossless.checks import (
    EDGE_SHARE,
    LEAST_TOKENS,
    LOGIT_ERROR,
    by_stratum,
    log_prob_tolerance,
    response_strata,
    returned_log_prob_check,
    setting_checks,
    support_check,
    uniformity_check,
)
from cotrain.lossless.emitted import Draws, draws_of, emitted_draws, response_draws, target_log_probs
from cotrain.lossless.family import detectable_distance, tokens_for_distance
from cotrain.lossless.setting import GREEDY, PLAIN, Setting, standard_settings
from cotrain.records import Rollout, RolloutRequest
from drafters.base import SamplingParams
from tests.cotrain.lossless.conftest import DRAFTED, MODEL, all_checks, draws
from tests.cotrain.lossless.markov_engine import MarkovEngine, MarkovModel
from tests.cotrain.lossless.simulated_sampler import VOCAB, speculate
from tests.cotrain.lossless.simulated_sampler import Setting as Simulated

LAW = [0.1, 0.4, 0.2, 0.3]
SHARPER = [0.05, 0.55, 0.15, 0.25]
"""At a total variation distance of 0.15 from LAW."""


def drawn(
    law: list[float], num: int, seed: int, actual: list[float] | None = None, drafted: torch.Tensor | None = None
) -> tuple[Draws, np.random.Generator]:
    """num tokens drawn from `actual`, under `law`."""
    p = torch.tensor(law, dtype=torch.float64).repeat(num, 1)
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.choice(len(law), size=num, p=actual or law))
    return draws_of(p.log(), tokens, drafted), rng


def test_orders_put_outcomes_before_each_other() -> None:
    log_law = torch.tensor([LAW], dtype=torch.float64).log()
    of_2 = draws_of(log_law, torch.tensor([2]), torch.tensor([False, True, False, True]))
    assert of_2.before[0] == pytest.approx([0.7, 0.7])
    of_1 = draws_of(log_law, torch.tensor([1]), torch.tensor([True, False, True, False]))
    assert of_1.before[0] == pytest.approx([0.0, 0.3])
    equal = torch.full((4, 4), 0.25, dtype=torch.float64).log()
    assert draws_of(equal, torch.arange(4)).before.tolist() == [[0], [0.25], [0.5], [0.75]]


def test_uniformity_holds_whatever_the_laws() -> None:
    rng = np.random.default_rng(0)
    p = torch.from_numpy(rng.dirichlet(np.full(6, 0.3), size=4000))
    tokens = torch.from_numpy((rng.random((4000, 1)) > p.numpy().cumsum(1)).sum(1).clip(max=5))
    found = draws_of(p.log(), tokens, torch.arange(6) % 2 == 0)
    assert all(uniformity_check(found, "", rng, order).p > 1e-3 for order in range(2))


def test_one_impossible_token_is_proof() -> None:
    log_law = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64).log().log_softmax(1).repeat(1000, 1)
    tokens = torch.zeros(1000, dtype=torch.int64)
    tokens[7] = 2
    found = draws_of(log_law, tokens)
    result = support_check(found, "")
    assert (result.p, result.effect) == (0.0, 0.001)
    assert np.isfinite(found.log_prob).all()
    explained = draws_of(log_law, tokens, outside=torch.zeros(1000, dtype=torch.bool))
    assert support_check(explained, "").p == 1.0


def test_effect_of_a_sharper_law_is_its_total_variation_distance() -> None:
    found, rng = drawn(LAW, 50_000, 1, actual=SHARPER)
    result = uniformity_check(found, "", rng)
    assert result.effect == pytest.approx(0.15, abs=0.01)
    assert result.p < 1e-100


def test_an_order_finds_what_the_one_by_probability_misses() -> None:
    """Mass moved between tokens of one probability, from those outside a draft vocabulary to those in it."""
    found, rng = drawn([0.25] * 4, 4000, 2, actual=[0.2, 0.3, 0.2, 0.3], drafted=torch.arange(4) % 2 == 1)
    assert uniformity_check(found, "", rng, 1).effect == pytest.approx(0.1, abs=0.03)
    assert uniformity_check(found, "", rng).effect < 0.07


@pytest.mark.parametrize(("error", "p"), [(1e-4, 1.0), (1e-2, 0.0), (np.nan, 0.0)])
def test_returned_log_probs_are_the_laws(error: float, p: float) -> None:
    found, _ = drawn(LAW, 10, 5)
    returned = found.log_prob.copy()
    returned[3] += error
    assert returned_log_prob_check(returned, found, "", tolerance=1e-3).p == p


def test_the_power_calculation_keeps_its_promise() -> None:
    level, actual = 0.01 / 20, [0.07, 0.46, 0.18, 0.29]
    num = tokens_for_distance(0.06, level)

    def caught(tokens: int) -> float:
        runs = (drawn(LAW, tokens, seed, actual) for seed in range(40))
        return float(np.mean([uniformity_check(found, "", rng).p <= level for found, rng in runs]))

    assert caught(num) >= 0.85
    assert caught(num // 3) < 0.6
    assert detectable_distance(num, level) == pytest.approx(0.06, rel=1e-3)
    assert detectable_distance(1, level) == 1.0
    assert tokens_for_distance(0.03, level) == pytest.approx(4 * num, rel=1e-3)
    assert tokens_for_distance(0.06, level / 10) > num


@pytest.mark.parametrize(
    ("steps", "num", "strata"),
    [
        ((), 3, ["undrafted"] * 3),
        (((2, 2), (2, 0)), 5, ["undrafted", "drafted 1", "drafted 2", "bonus", "drafted 1"]),
        (((3, 3),), 3, ["undrafted", "drafted 1", "drafted 2"]),  # the last step is cut
        (((2, 1),), 4, ["unknown"] * 4),  # a step without drafts lies somewhere
    ],
)
def test_places_in_steps_come_from_vllms_record(steps: tuple, num: int, strata: list[str]) -> None:
    assert response_strata(steps, num) == strata


def test_steps_beyond_the_response_are_an_error() -> None:
    with pytest.raises(ValueError, match="go on after"):
        response_strata(((1, 0), (1, 0), (1, 0)), 2)


def test_the_simulated_strata_are_those_of_the_steps() -> None:
    """The simulator tells offsets apart by itself; an engine reports accepted tokens a step."""
    run = speculate(MODEL, Simulated(k=2), 1, 40, np.random.default_rng(0))
    starts = np.r_[np.flatnonzero(run.offset == 0), len(run.token)]
    accepted = [int(run.accepted[a:b].sum()) for a, b in pairwise(starts)]
    accepted[-1] = 2  # cut by the end of the text
    assert response_strata([(2, a) for a in accepted], len(run.token) + 1)[1:] == list(run.strata)


def test_accepted_tokens_alone_do_not_have_the_targets_law() -> None:
    """The trap that strata by the past avoid: a lossless engine would be called lossy."""
    emitted, rng = speculate(MODEL, Simulated(), 100, 50, np.random.default_rng(1)), np.random.default_rng(3)
    emitted = emitted.select(emitted.offset < emitted.drafted)
    by_outcome = by_stratum(draws(emitted, Simulated()), np.where(emitted.accepted, "accepted", "recovered"))
    assert min(r.p for part in by_outcome.values() for r in all_checks(part, "", rng)) < 1e-10


def test_small_strata_are_left_out() -> None:
    emitted = speculate(MODEL, Simulated(), 20, 50, np.random.default_rng(5))
    sizes = {name: len(part) for name, part in by_stratum(draws(emitted, Simulated()), emitted.strata).items()}
    assert "drafted 1" in sizes
    assert min(sizes.values()) >= LEAST_TOKENS


def test_log_probs_may_differ_by_twice_a_logits_error() -> None:
    assert log_prob_tolerance(PLAIN, 5e-4) == pytest.approx((1e-3, 0.0))
    assert log_prob_tolerance(SamplingParams(0.5, 0.9, 0, ""), 5e-4) == pytest.approx((2e-3, -math.log(0.9)))
    assert log_prob_tolerance(SamplingParams(1.0, 1.0, 5, ""), 5e-4) == pytest.approx((1e-3, math.log(1.2)))
    near, edge = log_prob_tolerance(SamplingParams(1.0, 0.9, 0, ""), LOGIT_ERROR["bfloat16"])
    assert (near, edge) == pytest.approx((0.5 - math.log(0.9), 0.0))


@pytest.mark.parametrize("tied", ["law", "engine"])
def test_a_tie_with_the_kth_token_that_only_one_side_has_is_no_fault(tied: str) -> None:
    """vLLM and the law keep what equals the k-th; adding up in another order makes ties, and breaks them."""
    sampling, error = SamplingParams(1.0, 1.0, 2, ""), LOGIT_ERROR["float32"]
    plain, tie = torch.tensor([[1.0, 1.0 - 1e-6, 1.0 - 2e-6, 0.0]]), torch.tensor([[1.0, 1.0 - 1e-6, 1.0 - 1e-6, 0.0]])
    tokens = torch.zeros(1000, dtype=torch.long)
    engine, law = plain.repeat(1000, 1), plain.repeat(1000, 1)
    (engine if tied == "engine" else law)[0] = tie
    returned = target_log_probs(engine, sampling)[:, 0].numpy()
    found = emitted_draws(law, tokens, sampling, logit_tolerance=error)
    assert returned_log_prob_check(returned, found, "", *log_prob_tolerance(sampling, error)).p > 0.99
    assert returned_log_prob_check(returned, found, "", log_prob_tolerance(sampling, error)[0]).p == 0.0


@pytest.mark.parametrize("num", [100, 405, 2000])
def test_cuts_elsewhere_alarm_no_more_often_than_stated(num: int) -> None:
    """Exact: every number of tokens of which each is cut elsewhere with probability EDGE_SHARE, by its probability."""
    response = np.random.default_rng(0).integers(VOCAB, size=num).tolist()
    found = response_draws(MarkovModel(), [0], response, PLAIN)
    level, alarms = 0.01, 0.0
    for elsewhere in range(num + 1):
        returned = found.log_prob + 0.05 * (np.arange(num) < elsewhere)
        p = returned_log_prob_check(returned, found, "", 1e-3, edge=0.1).p
        alarms += float(stats.binom.pmf(elsewhere, num, EDGE_SHARE)) * (p <= level)
    assert 0.1 * level < alarms <= level
    far = found.log_prob + 0.2 * (np.arange(num) == 5)
    assert returned_log_prob_check(far, found, "", 1e-3, edge=0.1).p == 0.0


def rollouts_of(setting: Setting, num: int = 60) -> list[Rollout]:
    engine = MarkovEngine()
    engine.num_speculative_tokens, engine.method = setting.num_speculative_tokens, setting.method
    requests = [RolloutRequest("p", i, [i % VOCAB], None) for i in range(num)]
    sampling = setting.samplings[0]
    generated = engine.generate(requests, False, 50, sampling.temperature, sampling.top_p, sampling.top_k)
    return asyncio.run(generated).rollouts


@pytest.mark.parametrize(
    "setting", [s for s in standard_settings(2) if len(s.samplings) == 1 and not s.unsteady], ids=str
)
def test_no_more_checks_than_counted_beforehand(setting: Setting) -> None:
    rollouts, samplings = rollouts_of(setting), [setting.samplings[0]] * 60
    laws = [response_draws(MarkovModel(), r.prompt_token_ids, r.token_ids, samplings[0], DRAFTED) for r in rollouts]
    results = setting_checks(rollouts, samplings, laws, "s", np.random.default_rng(0), 5e-4)
    assert 0 < len(results) <= setting.num_checks(num_orders=2)
    assert min(r.p for r in results) > 1e-4
    strata = {r.setting for r in results} - {"s", "s: bonus"}
    assert strata == {f"s: drafted {j}" for j in range(1, setting.num_speculative_tokens + 1)}
    shuffled = [replace(r, log_probs=r.log_probs[::-1]) for r in rollouts]
    broken = setting_checks(shuffled, samplings, laws, "s", np.random.default_rng(0), 5e-4)
    assert [r.p for r in broken if r.check == "returned log-probs"] == [0.0]


def test_the_standard_settings_cover_every_length_drafting_and_sampler() -> None:
    settings = standard_settings(3)
    assert settings[0].num_speculative_tokens == 0, "the control"
    assert {s.num_speculative_tokens for s in settings} == {0, 1, 2, 3}
    assert {s.method for s in settings if s.num_speculative_tokens} == {"greedy", "probabilistic"}
    mixed = [s for s in settings if len(s.samplings) > 1]
    assert len(mixed) == 2 and all(GREEDY in s.samplings for s in mixed)
    assert len(set(map(str, settings))) == len(settings)


def test_half_of_the_requests_are_seeded_whatever_their_sampler() -> None:
    setting = Setting(1, "greedy", (PLAIN, GREEDY))
    for sampling in (PLAIN, GREEDY):
        assert sum(setting.is_seeded(i) for i in range(20) if setting.sampling(i) is sampling) == 5
