"""Which matrices of a host's policy a drafter can learn from. tests/engine/test_sidecar_hosts.py has the rest on real engines."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from cotrain.engine.host.policy_watch import PolicyWatch


def matrix(kind: type[nn.Module], dtype: torch.dtype | None) -> nn.Module:
    """One of vLLM's matrices with a weight of this type, or with none. Its constructor wants the ranks of an engine."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    if dtype is not None:
        module.weight = nn.Parameter(torch.zeros(4, 2, dtype=dtype), requires_grad=False)
    return module


@pytest.fixture
def watch() -> Callable[..., PolicyWatch]:
    def make(embedding: torch.dtype | None, head: torch.dtype | None) -> PolicyWatch:
        found = PolicyWatch.__new__(PolicyWatch)
        found._model = nn.ModuleList([matrix(VocabParallelEmbedding, embedding), matrix(ParallelLMHead, head)])
        return found

    return make


def test_plain_matrices_are_found(watch: Callable[..., PolicyWatch]) -> None:
    assert [*watch(torch.bfloat16, torch.float32)._matrices()] == ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("embedding", "head", "named"),
    [
        (torch.float32, torch.int8, r"^lm_head\.weight is quantised"),
        (torch.float8_e4m3fn, torch.float32, r"^model\.embed_tokens\.weight is quantised"),
        (torch.float32, None, r"^a ParallelLMHead has no plain weight"),
    ],
)
def test_a_quantised_matrix_is_refused_by_name(
    embedding: torch.dtype | None, head: torch.dtype | None, named: str, watch: Callable[..., PolicyWatch]
) -> None:
    with pytest.raises(ValueError, match=f"{named}.*quantise other layers alone$"):
        watch(embedding, head)._matrices()
