"""The target's processed law: vLLM's order of operations, and which tokens no rounding explains."""

import pytest
import torch

from cotrain.lossless.target_law import emitted_draws, target_log_probs
from drafters.base import Sampler


def sampler(temperature=1.0, top_p=1.0, top_k=0) -> Sampler:
    return Sampler(temperature, top_p, top_k, "probabilistic")


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
def test_temperature_then_top_k_then_top_p(settings, expected):
    law = torch.tensor([expected], dtype=torch.float64)
    torch.testing.assert_close(target_log_probs(LOGITS, sampler(**settings)).exp(), law / law.sum(), rtol=0, atol=1e-7)


def test_log_probs_of_emitted_tokens():
    logits = torch.randn(70, 11, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(70) % 11
    draws = emitted_draws(logits, tokens, sampler(0.7), chunk_rows=32)
    expected = (logits.double() / 0.7).log_softmax(1)[torch.arange(70), tokens]
    torch.testing.assert_close(torch.from_numpy(draws.log_prob), expected, rtol=0, atol=1e-6)
    assert not draws.outside.any()


def outside(token, settings, tolerance, logits=LOGITS):
    return bool(emitted_draws(logits, torch.tensor([token]), sampler(**settings), logit_tolerance=tolerance).outside[0])


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.7}, {"temperature": 0}])
def test_a_token_beyond_the_edge_is_outside(settings):
    assert outside(3, settings, 0.0)
    assert outside(3, settings, 0.05)
    assert not outside(0, settings, 0.0)


def test_rounding_may_swap_tokens_at_the_edge():
    """0.15 is log(0.25 / 0.15) = 0.51 below the last token kept: errors of 0.26 on both sides."""
    assert outside(2, {"top_k": 2}, 0.25)
    assert not outside(2, {"top_k": 2}, 0.26)
    assert outside(2, {"temperature": 0.5, "top_k": 2}, 0.25), "the gap and the error grow alike with 1 / temperature"
    assert not outside(2, {"temperature": 0.5, "top_k": 2}, 0.26)


def test_rounding_may_move_the_cut_of_top_p():
    """A mass of 0.75 that reaches 0.7501 or not: the next token is possible, the one after is not."""
    logits = torch.tensor([[0.5, 0.2501, 0.02, 0.01]]).log()
    assert outside(2, {"top_p": 0.9615}, 0.0, logits)
    assert not outside(2, {"top_p": 0.9615}, 0.01, logits)
    assert outside(3, {"top_p": 0.9615}, 0.01, logits)


def test_an_argmax_tie_is_no_failure():
    assert outside(1, {"temperature": 0}, 0.3)
    assert not outside(1, {"temperature": 0}, 0.35)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": -1}, "temperature is -1"), ({"top_p": 0}, "top_p is 0"), ({"top_k": -2}, "top_k is -2")],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        target_log_probs(LOGITS, sampler(**settings))


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        target_log_probs(LOGITS * torch.nan, sampler())
    with pytest.raises(ValueError, match="logit_tolerance is -1"):
        emitted_draws(LOGITS, torch.tensor([0]), sampler(), logit_tolerance=-1)
