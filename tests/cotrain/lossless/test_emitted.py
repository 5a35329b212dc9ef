"""The target's processed law: vLLM's order of operations, its own positions, and which tokens no rounding explains."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cotrain.lossless.emitted import emitted_draws, response_draws, target_log_probs
from cotrain.models.loading import resolve_model
from drafters.base import SamplingParams
from tests.cotrain.lossless.conftest import DRAFTED, MODEL
from tests.cotrain.lossless.markov_engine import MarkovModel
from tests.cotrain.lossless.simulated_sampler import VOCAB


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, "probabilistic")


LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.25, 0.0625, 0.0225, 0.01]),
        ({"top_k": 2}, [0.5, 0.25, 0, 0]),
        ({"top_k": -1}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.7}, [0.5, 0.25, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0.5, 0.25, 0, 0]),  # top-p of what top-k left: 0.75 / 0.9 reaches 0.8
        ({"temperature": 0.5, "top_p": 0.7}, [0.25, 0, 0, 0]),  # 0.25 / 0.345 reaches 0.7 at this temperature
        ({"temperature": 0}, [1, 0, 0, 0]),
    ],
)
def test_temperature_then_top_k_then_top_p(settings: dict, expected: list[float]) -> None:
    law = torch.tensor([expected], dtype=torch.float64)
    torch.testing.assert_close(target_log_probs(LOGITS, sampling(**settings)).exp(), law / law.sum(), rtol=0, atol=1e-7)


def test_laws_of_a_response_are_those_of_its_own_positions() -> None:
    """Row t of the forward predicts token t + 1; 150 tokens are more than one chunk of the head."""
    rng = np.random.default_rng(0)
    prompt, response = [4, 7], rng.integers(VOCAB, size=150).tolist()
    truncated = SamplingParams(0.8, 0.9, 12, "")
    found = response_draws(MarkovModel(), prompt, response, truncated, DRAFTED)
    logits = torch.from_numpy(MODEL.target[[7, *response[:-1]]]).float()
    expected = emitted_draws(logits, torch.tensor(response), truncated, DRAFTED)
    assert len(found) == 150
    np.testing.assert_allclose(found.probability, expected.probability, atol=1e-6)
    np.testing.assert_allclose(found.before, expected.before, atol=1e-6)


def test_laws_of_a_real_model_are_its_logits() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:llama"), dtype=torch.float32).eval()
    prompt, response = [50, 60, 70], list(range(40, 110))
    draws = response_draws(model, prompt, response, sampling(0.7))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, 2:-1] / 0.7
    expected = logits.double().log_softmax(1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
    np.testing.assert_allclose(draws.log_prob, expected, atol=1e-4)
    assert not draws.outside.any()


def outside(token: int, settings: dict, tolerance: float, logits: torch.Tensor = LOGITS) -> bool:
    return bool(
        emitted_draws(logits, torch.tensor([token]), sampling(**settings), logit_tolerance=tolerance).outside[0]
    )


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.7}, {"temperature": 0}])
def test_a_token_beyond_the_edge_is_outside(settings: dict) -> None:
    assert outside(3, settings, 0.0)
    assert outside(3, settings, 0.05)
    assert not outside(0, settings, 0.0)


def test_rounding_may_swap_tokens_at_the_edge() -> None:
    """0.15 is log(0.25 / 0.15) = 0.51 below the last token kept: errors of 0.26 on both sides."""
    assert outside(2, {"top_k": 2}, 0.25)
    assert not outside(2, {"top_k": 2}, 0.26)
    assert outside(2, {"temperature": 0.5, "top_k": 2}, 0.25), "the gap and the error grow alike with 1 / temperature"
    assert not outside(2, {"temperature": 0.5, "top_k": 2}, 0.26)


def test_rounding_may_move_the_cut_of_top_p() -> None:
    """A mass of 0.75 that reaches 0.7501 or not: the next token is possible, the one after is not."""
    logits = torch.tensor([[0.5, 0.2501, 0.02, 0.01]]).log()
    assert outside(2, {"top_p": 0.9615}, 0.0, logits)
    assert not outside(2, {"top_p": 0.9615}, 0.01, logits)
    assert outside(3, {"top_p": 0.9615}, 0.01, logits)


def test_an_argmax_tie_is_no_failure() -> None:
    assert outside(1, {"temperature": 0}, 0.3)
    assert not outside(1, {"temperature": 0}, 0.35)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        target_log_probs(LOGITS * torch.nan, sampling())
