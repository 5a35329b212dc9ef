"""Draft tokens sampled in the draft vocabulary have vLLM's own distribution, on vLLM's own EAGLE-3 model."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from cotrain.engine import cpu as vllm_compat
from cotrain.engine import loading as vllm_weights

ROWS = 4


def sampling(temperatures: list[float]) -> SimpleNamespace:
    """What drafting reads of vLLM's SamplingMetadata."""
    greedy = [t == 0 for t in temperatures]
    return SimpleNamespace(temperature=torch.tensor(temperatures), all_greedy=all(greedy), all_random=not any(greedy))


@pytest.fixture
def proposer(target_and_drafter: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's proposer, without the engine it belongs to, drawing as in our engines."""
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.spec_decode.eagle import EagleProposer

    for patch in (vllm_compat.no_noise, vllm_compat.draw_draft_tokens):
        name = vllm_compat.PATCHES[patch][1]
        monkeypatch.setattr(llm_base_proposer, name, inspect.unwrap(getattr(llm_base_proposer, name)))
        vllm_compat.apply(patch)
    proposer = object.__new__(EagleProposer)
    proposer.model = target_and_drafter[1].model
    vllm_weights.reload_weights(proposer.model, target_and_drafter[1].model_config, target_and_drafter[1].state)
    proposer.use_local_argmax_reduction = proposer.use_heterogeneous_vocab = proposer.use_fp64_gumbel = False
    proposer._enable_probabilistic_draft_probs = True
    return proposer


def vllms_own(proposer: Any, hidden: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sampling after the logits were spread over the target's vocabulary."""
    return proposer._sample_from_logits(proposer.model.compute_logits(hidden), metadata)


@pytest.fixture
def hidden(proposer: Any) -> torch.Tensor:
    return 3 * torch.randn(ROWS, proposer.model.config.hidden_size, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("temperatures", [[1.0] * ROWS, [0.5, 2.0, 1.0, 0.7], [0.0, 1.0, 0.0, 2.0]])
def test_probabilities_are_vllms(proposer: Any, hidden: torch.Tensor, temperatures: list[float]) -> None:
    _, expected = vllms_own(proposer, hidden, sampling(temperatures))
    tokens, probs = vllm_compat.sample_in_draft_vocabulary(None, proposer, hidden, sampling(temperatures))
    assert probs is not None
    assert probs.shape == (ROWS, 500)
    torch.testing.assert_close(probs, expected)
    assert torch.equal(probs > 0, expected > 0)
    assert (probs.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("enabled", [True, False])
def test_greedy_drafts_are_vllms(proposer: Any, hidden: torch.Tensor, enabled: bool) -> None:
    """Greedy drafting, and probabilistic drafting for greedy requests."""
    proposer._enable_probabilistic_draft_probs = enabled
    metadata = sampling([0.0 if enabled else 1.0] * ROWS)
    expected, none = vllms_own(proposer, hidden, metadata)
    tokens, probs = vllm_compat.sample_in_draft_vocabulary(None, proposer, hidden, metadata)
    assert torch.equal(tokens, expected)
    assert (none, probs) == (None, None)


def test_tokens_are_drawn_from_these_probabilities(proposer: Any, hidden: torch.Tensor) -> None:
    """Verification is lossless only then. Seeded; 20000 draws of the first row."""
    torch.manual_seed(0)
    num = 20_000
    tokens, probs = vllm_compat.sample_in_draft_vocabulary(
        None, proposer, hidden[:1].repeat(num, 1), sampling([4.0] * num)
    )
    assert probs is not None
    expected = probs[0].double() * num
    drawn = expected > 0
    observed = tokens.bincount(minlength=500).double()
    assert observed[~drawn].sum() == 0
    scale = num / expected.sum()  # float32 probabilities add up to 1 within 1e-6, chisquare wants it exact
    assert chisquare(observed[drawn].numpy(), (expected * scale)[drawn].numpy()).pvalue > 1e-4


def test_a_swapped_vocabulary_map_takes_effect(proposer: Any, hidden: torch.Tensor) -> None:
    before, _ = vllm_compat.sample_in_draft_vocabulary(None, proposer, hidden, sampling([0.0] * ROWS))
    proposer.model.draft_id_to_target_id.data += 1
    after, _ = vllm_compat.sample_in_draft_vocabulary(None, proposer, hidden, sampling([0.0] * ROWS))
    assert torch.equal(after, before + 1)


def test_the_patch_is_in_place_and_leaves_other_drafters_alone(
    proposer: Any, hidden: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Base

    def not_called(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("logits were spread over the target's vocabulary")

    # Put back at the end as it was before.
    monkeypatch.setattr(Base, "_sample_draft_tokens", inspect.unwrap(Base._sample_draft_tokens))
    vllm_compat.apply(vllm_compat.sample_in_draft_vocabulary)
    monkeypatch.setattr(proposer.model, "compute_logits", not_called)
    assert proposer._sample_draft_tokens(hidden, sampling([1.0] * ROWS))[1].shape == (ROWS, 500)

    whole_vocabulary = SimpleNamespace(draft_id_to_target_id=None, compute_logits=lambda hidden: hidden)
    proposer.model = whole_vocabulary
    tokens, _ = proposer._sample_draft_tokens(torch.eye(3), sampling([0.0] * 3))
    assert tokens.tolist() == [0, 1, 2]
