"""EAGLE-3 as an engine runs it."""

import pytest
import torch
from torch import Tensor

from drafters.alignment import DraftBatch
from drafters.eagle3.model import Eagle3Drafter
from tests.drafters.conftest import TARGET, make_batch, make_drafter
from tests.drafters.decoding import DOCUMENTS, CachedDecoder, assert_unroll_equals


class Eagle3Decoder(CachedDecoder):
    """What is fed back is the layer's output before the final norm."""

    head_dim = rotary_dim = TARGET.head_dim

    def __init__(self, drafter: Eagle3Drafter) -> None:
        super().__init__(drafter)
        self.norm_before_residual = drafter.shape.norm_before_residual

    def first(self, batch: DraftBatch, row: int) -> Tensor:
        layers = batch.aux_hidden[row].chunk(3)
        if "fc_norm.0.weight" in self.weights:
            layers = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(layers)]
        return self.linear(torch.cat(list(layers)), "fc")

    def step(self, embedding: Tensor, hidden: Tensor, position: int, cache: list) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden, "layers.0.hidden_norm")
        x = torch.cat([self.norm(embedding, "layers.0.input_layernorm"), normed])
        residual = normed if self.norm_before_residual else hidden
        q, k, v = (self.linear(x, f"layers.0.self_attn.{n}_proj").view(-1, self.head_dim) for n in "qkv")
        cache.append((self.rotate(k, position), v))
        attended = self.attend(self.rotate(q, position), cache)
        hidden = residual + self.linear(attended, "layers.0.self_attn.o_proj")
        hidden = hidden + self.mlp(self.norm(hidden, "layers.0.post_attention_layernorm"), "layers.0.mlp")
        return hidden, self.norm(hidden, "norm")


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(
    "variant",
    [
        {"fc_norm": False},
        {"fc_norm": True},
        {"norm_before_residual": True},
        *({"sliding_window": w} for w in (1, 3, 6)),
    ],
    ids=str,
)
def test_unroll_equals_decoding_with_a_kv_cache(documents, variant, target_weights):
    drafter = make_drafter(trained_depth=4, **variant)
    assert_unroll_equals(Eagle3Decoder(drafter), drafter, make_batch(*documents), target_weights)
