"""EAGLE-3 as an engine runs it."""

import pytest
import torch
from torch import Tensor

from drafters.alignment import DraftBatch
from drafters.eagle3.model import Eagle3Drafter
from tests.drafters.conftest import TARGET, make_batch, make_drafter
from tests.drafters.decoding import DOCUMENTS, CachedDecoder, assert_unroll_equals


class Eagle3Decoder(CachedDecoder):
    """An entry of the cache is a list with the key and value of each layer."""

    head_dim = rotary_dim = TARGET.head_dim

    def __init__(self, drafter: Eagle3Drafter) -> None:
        super().__init__(drafter)
        self.shape = drafter.shape

    def first(self, batch: DraftBatch, row: int) -> Tensor:
        states = batch.aux_hidden[row]
        if self.shape.norm_before_fc:
            states = self.norm(states, "input_norm")
        layers = states.chunk(len(self.shape.aux_layers))
        if self.shape.fc_norm:
            layers = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(layers)]
        return self.linear(torch.cat(list(layers)), "fc")

    def step(self, embedding: Tensor, hidden: Tensor, position: int, cache: list) -> tuple[Tensor, Tensor]:
        cache.append([])
        for number in range(self.shape.sizes.num_layers):
            layer = f"layers.{number}"
            x, residual = self.norm(hidden, f"{layer}.input_layernorm"), hidden
            if number == 0:
                normed = self.norm(hidden, f"{layer}.hidden_norm")
                x = torch.cat([self.norm(embedding, f"{layer}.input_layernorm"), normed])
                residual = normed if self.shape.norm_before_residual else hidden
            q, k, v = (self.linear(x, f"{layer}.self_attn.{n}_proj").view(-1, self.head_dim) for n in "qkv")
            cache[-1].append((self.rotate(k, position), v))
            attended = self.attend(self.rotate(q, position), [row[number] for row in cache])
            hidden = residual + self.linear(attended, f"{layer}.self_attn.o_proj")
            hidden = hidden + self.mlp(self.norm(hidden, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        normed = self.norm(hidden, "norm")
        return normed if self.shape.norm_output else hidden, normed


COMBINED = {"norm_output": True, "norm_before_fc": True, "attention_bias": True, "num_layers": 2}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(
    "variant",
    [
        {"fc_norm": False},
        {"fc_norm": True},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"norm_before_fc": True, "fc_norm": False},
        {"attention_bias": True},
        {"num_layers": 3, "sliding_window": 4},
        COMBINED | {"aux_layers": (1, 2, 4, 5)},
        *({"sliding_window": w} for w in (1, 3, 6)),
    ],
    ids=str,
)
def test_unroll_equals_decoding_with_a_kv_cache(documents, variant, target_weights):
    drafter = make_drafter(trained_depth=4, **variant)
    assert_unroll_equals(
        Eagle3Decoder(drafter), drafter, make_batch(*documents, num_aux=len(drafter.shape.aux_layers)), target_weights
    )
