"""From rollouts to checks."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from cotrain.lossless.draws import members_first
from cotrain.lossless.emitted import LOGIT_ERROR, log_prob_tolerance, response_draws, setting_checks
from cotrain.lossless.goodness import EDGE_SHARE, returned_log_prob_check
from cotrain.lossless.setting import GREEDY, PLAIN, Setting, num_checks, standard_settings
from cotrain.lossless.target_law import emitted_draws, target_log_probs
from cotrain.lossless.verification import response_strata
from cotrain.models.loading import resolve_model
from cotrain.records import RolloutRequest
from drafters.base import Sampler
from tests.cotrain.lossless.conftest import MODEL
from tests.cotrain.lossless.markov_engine import MarkovEngine, MarkovModel
from tests.cotrain.lossless.simulated_sampler import VOCAB


def test_laws_of_a_response_are_those_of_its_own_positions() -> None:
    """Row t of the forward predicts token t + 1; 150 tokens are more than one chunk of the head."""
    rng = np.random.default_rng(0)
    prompt, response = [4, 7], rng.integers(VOCAB, size=150).tolist()
    sampler = Sampler(0.8, 0.9, 12, "")
    orders = {"draft vocabulary": members_first(MODEL.draft_vocabulary.tolist(), VOCAB)}
    found = response_draws(MarkovModel(), prompt, response, sampler, orders)
    logits = torch.from_numpy(MODEL.target[[7, *response[:-1]]]).float()
    expected = emitted_draws(logits, torch.tensor(response), sampler, orders)
    assert len(found) == 150
    np.testing.assert_allclose(found.probability, expected.probability, atol=1e-6)
    np.testing.assert_allclose(found.before["draft vocabulary"], expected.before["draft vocabulary"], atol=1e-6)


def test_laws_of_a_real_model_are_its_logits() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:llama"), dtype=torch.float32).eval()
    prompt, response = [50, 60, 70], list(range(40, 110))
    draws = response_draws(model, prompt, response, Sampler(0.7, 1.0, 0, ""))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, 2:-1] / 0.7
    expected = logits.double().log_softmax(1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
    np.testing.assert_allclose(draws.log_prob, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("steps", "num", "strata"),
    [
        ((), 3, ["undrafted"] * 3),
        (((2, 2), (2, 0)), 5, ["undrafted", "drafted 1", "drafted 2", "bonus", "drafted 1"]),
        (((2, 2),), 3, ["undrafted", "drafted 1", "drafted 2"]),  # the last step is cut
        (((2, 1),), 4, ["unknown"] * 4),  # a step without drafts lies somewhere
    ],
)
def test_places_in_steps_come_from_vllms_record(steps: tuple, num: int, strata: list[str]) -> None:
    assert response_strata(steps, num) == strata


def test_steps_beyond_the_response_are_an_error() -> None:
    with pytest.raises(ValueError, match="go on after"):
        response_strata(((1, 0), (1, 0), (1, 0)), 2)


def test_log_probs_may_differ_by_twice_a_logits_error() -> None:
    assert log_prob_tolerance(PLAIN, 5e-4) == pytest.approx((1e-3, 0.0))
    assert log_prob_tolerance(Sampler(0.5, 0.9, 0, ""), 5e-4) == pytest.approx((2e-3, -math.log(0.9)))
    assert log_prob_tolerance(Sampler(1.0, 1.0, 5, ""), 5e-4) == pytest.approx((1e-3, math.log(1.2)))
    near, edge = log_prob_tolerance(Sampler(1.0, 0.9, 0, ""), LOGIT_ERROR["bfloat16"])
    assert (near, edge) == pytest.approx((0.5 - math.log(0.9), 0.0))
    with pytest.raises(ValueError, match="temperature is 0"):
        log_prob_tolerance(GREEDY, 5e-4)


@pytest.mark.parametrize("tied", ["law", "engine"])
def test_a_tie_with_the_kth_token_that_only_one_side_has_is_no_fault(tied: str) -> None:
    """vLLM and the law keep what equals the k-th; adding up in another order makes ties, and breaks them."""
    sampler, error = Sampler(1.0, 1.0, 2, ""), LOGIT_ERROR["float32"]
    plain, tie = torch.tensor([[1.0, 1.0 - 1e-6, 1.0 - 2e-6, 0.0]]), torch.tensor([[1.0, 1.0 - 1e-6, 1.0 - 1e-6, 0.0]])
    tokens = torch.zeros(1000, dtype=torch.long)
    engine, law = plain.repeat(1000, 1), plain.repeat(1000, 1)
    (engine if tied == "engine" else law)[0] = tie
    returned = target_log_probs(engine, sampler)[:, 0].numpy()
    draws = emitted_draws(law, tokens, sampler, logit_tolerance=error)
    assert returned_log_prob_check(returned, draws, "", *log_prob_tolerance(sampler, error)).p > 0.99
    assert returned_log_prob_check(returned, draws, "", log_prob_tolerance(sampler, error)[0]).p == 0.0


def test_a_few_tokens_may_lie_on_the_other_side_of_a_cut() -> None:
    response = np.random.default_rng(0).integers(VOCAB, size=1000).tolist()
    draws = response_draws(MarkovModel(), [0], response, PLAIN)
    for share, least, most in ((0.0, 1.0, 1.0), (0.01, 0.4, 0.7), (0.05, 0.0, 1e-15)):
        returned = draws.log_prob + 0.05 * (np.arange(1000) < 1000 * share)
        assert least <= returned_log_prob_check(returned, draws, "", 1e-3, edge=0.1).p <= most
    far = draws.log_prob + 0.2 * (np.arange(1000) == 5)
    assert returned_log_prob_check(far, draws, "", 1e-3, edge=0.1).p == 0.0


@pytest.mark.parametrize("num", [100, 405, 2000])
def test_cuts_elsewhere_alarm_no_more_often_than_stated(num: int) -> None:
    """Exact: every number of tokens of which each is cut elsewhere with probability EDGE_SHARE, by its probability."""
    response = np.random.default_rng(0).integers(VOCAB, size=num).tolist()
    draws = response_draws(MarkovModel(), [0], response, PLAIN)
    level, alarms = 0.01, 0.0
    for elsewhere in range(num + 1):
        returned = draws.log_prob + 0.05 * (np.arange(num) < elsewhere)
        p = returned_log_prob_check(returned, draws, "", 1e-3, edge=0.1).p
        alarms += float(stats.binom.pmf(elsewhere, num, EDGE_SHARE)) * (p <= level)
    assert 0.1 * level < alarms <= level


def rollouts_of(setting: Setting, num: int = 60):
    engine = MarkovEngine()
    engine.draft_tokens, engine.method = setting.draft_tokens, setting.method
    requests = [RolloutRequest("p", i, [i % VOCAB], None) for i in range(num)]
    sampler = setting.samplers[0]
    generated = engine.generate(requests, False, 50, sampler.temperature, sampler.top_p, sampler.top_k)
    return asyncio.run(generated).rollouts


@pytest.mark.parametrize(
    "setting", [s for s in standard_settings(2) if len(s.samplers) == 1 and not s.unsteady], ids=str
)
def test_no_more_checks_than_counted_beforehand(setting: Setting) -> None:
    rollouts, samplers = rollouts_of(setting), [setting.samplers[0]] * 60
    orders = {"draft vocabulary": members_first(MODEL.draft_vocabulary.tolist(), VOCAB)}
    draws = [response_draws(MarkovModel(), r.prompt_token_ids, r.token_ids, samplers[0], orders) for r in rollouts]
    results = setting_checks(rollouts, samplers, draws, "s", np.random.default_rng(0), 5e-4)
    assert 0 < len(results) <= num_checks(setting, num_orders=2)
    assert min(r.p for r in results) > 1e-4
    strata = {r.setting for r in results} - {"s", "s: bonus"}
    assert strata == {f"s: drafted {j}" for j in range(1, setting.draft_tokens + 1)}
    shuffled = [replace(r, log_probs=r.log_probs[::-1]) for r in rollouts]
    broken = setting_checks(shuffled, samplers, draws, "s", np.random.default_rng(0), 5e-4)
    assert [r.p for r in broken if r.check == "returned log-probs"] == [0.0]


def test_the_standard_settings_cover_every_length_drafting_and_sampler() -> None:
    settings = standard_settings(3)
    assert {s.draft_tokens for s in settings} == {0, 1, 2, 3}
    assert {s.method for s in settings if s.draft_tokens} == {"greedy", "probabilistic"}
    assert {s.seeding for s in settings} == {"seeded", "unseeded", "half seeded"}
    mixed = [s for s in settings if len(s.samplers) > 1]
    assert len(mixed) == 2 and all(GREEDY in s.samplers for s in mixed)
    assert len(set(map(str, settings))) == len(settings)


def test_half_of_the_requests_are_seeded_whatever_their_sampler() -> None:
    setting = Setting(1, "greedy", (PLAIN, GREEDY), "half seeded")
    for i in range(2):
        of_sampler = [
            setting.is_seeded(request) for request in range(20) if setting.sampler(request) is (PLAIN, GREEDY)[i]
        ]
        assert sum(of_sampler) == 5
