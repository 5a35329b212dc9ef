"""A tiny target with grouped-query attention, and packed rollouts of random numbers."""

import pytest
import torch

from drafters.base import DraftBatch, Sampler, TargetSpec, TargetWeights
from drafters.config import Eagle3Config
from drafters.eagle3.model import Eagle3Drafter

TARGET = TargetSpec(
    model_type="llama",
    vocab_size=40,
    hidden_size=16,
    num_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,  # not hidden_size / heads, as in Qwen3
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=512,
    eos_token_ids=(2,),
)


def make_batch(*documents: tuple[int, int, int], seed: int = 0, dtype: torch.dtype = torch.float64) -> DraftBatch:
    """Documents as (prompt length, response length, rows without features at the beginning).

    The last row of each has no features either. Rows without features are NaN, so that using one is noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + response for prompt, response, _ in documents]
    num_rows = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    document_ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(lengths))
    prompts, _, holes = (torch.tensor(column)[document_ids] for column in zip(*documents, strict=True))
    features = (positions >= holes) & (positions < torch.tensor(lengths)[document_ids] - 1)

    def hidden(width: int) -> torch.Tensor:
        values = torch.randn(num_rows, width, generator=generator, dtype=dtype)
        return values.masked_fill(~features[:, None], torch.nan)

    return DraftBatch(
        token_ids=torch.randint(TARGET.vocab_size, (num_rows,), generator=generator),
        aux_hidden=hidden(3 * TARGET.hidden_size),
        final_hidden=hidden(TARGET.hidden_size),
        feature_mask=features,
        response_mask=positions >= prompts,
        positions=positions,
        document_ids=document_ids,
        policy_version=0,
    )


def make_drafter(seed: int = 0, **config) -> Eagle3Drafter:
    """A drafter in float64 whose every weight matters: norms and projections are far from their initial values."""
    defaults = {"type": "eagle3", "draft_vocab_size": 20, "aux_layers": (2, 4, 5), "trained_depth": 3}
    drafter = Eagle3Drafter.from_config(Eagle3Config(**(defaults | config)), TARGET, seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return drafter


@pytest.fixture
def target_weights() -> TargetWeights:
    generator = torch.Generator().manual_seed(5)
    shape = (TARGET.vocab_size, TARGET.hidden_size)
    return TargetWeights(
        embedding=torch.randn(shape, generator=generator, dtype=torch.float64),
        head=torch.randn(shape, generator=generator, dtype=torch.float64),
        policy_version=0,
    )


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(temperature=1.0, top_p=1.0, top_k=0, draft_sample_method="probabilistic")
