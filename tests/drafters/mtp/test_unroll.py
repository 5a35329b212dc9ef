"""MTP heads as an engine runs them: the first hidden state is the target's, later ones are the head's own."""

import pytest
import torch
from torch import Tensor

from drafters.alignment import DraftBatch, align
from drafters.mtp.model import MtpDrafter
from tests.drafters.conftest import GLM, MIMO, MTP_KINDS, QWEN3_5, QWEN3_NEXT, TARGET, kind_name, make_batch
from tests.drafters.decoding import DOCUMENTS, HEADS, CachedDecoder, assert_unroll_equals


class MtpDecoder(CachedDecoder):
    """What is fed back is what the target's head reads: the state after the final norm."""

    prefix: str
    layer: str  # prefix of the decoder layer
    output_norm: str

    def __init__(self, drafter: MtpDrafter) -> None:
        super().__init__(drafter)
        self.weights = {name.removeprefix(self.prefix): tensor for name, tensor in self.weights.items()}

    def first(self, batch: DraftBatch, row: int) -> Tensor:
        return batch.final_hidden[row]

    def step(self, embedding: Tensor, hidden: Tensor, position: int, cache: list) -> tuple[Tensor, Tensor]:
        residual = self.join(embedding, hidden, position)
        x = self.norm(residual, f"{self.layer}input_layernorm")
        residual = residual + self.linear(self.attended(x, position, cache), f"{self.layer}self_attn.o_proj")
        x = self.norm(residual, f"{self.layer}post_attention_layernorm")
        normed = self.norm(residual + self.mlp(x, f"{self.layer}mlp"), self.output_norm)
        return normed, normed

    def projected(self, x: Tensor, name: str) -> Tensor:
        return self.linear(x, f"{self.layer}self_attn.{name}_proj")


class MiMoDecoder(MtpDecoder):
    prefix, layer, output_norm = "model.mtp_layers.0.", "", "final_layernorm"
    head_dim = rotary_dim = MIMO.target.hidden_size // HEADS

    def join(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        embedding = embedding if position > 0 else torch.zeros_like(embedding)
        both = [self.norm(hidden, "hidden_layernorm"), self.norm(embedding, "token_layernorm")]
        return self.linear(torch.cat(both), "input_proj")

    def attended(self, x: Tensor, position: int, cache: list) -> Tensor:
        q, k, v = (self.projected(x, name).view(-1, self.head_dim) for name in "qkv")
        cache.append((self.rotate(k, position), v))
        return self.attend(self.rotate(q, position), cache)


class Qwen3NextDecoder(MtpDecoder):
    prefix, layer, output_norm = "mtp.", "layers.0.", "norm"
    head_dim, rotary_dim = 8, 4

    def gain(self, name: str) -> Tensor:
        return 1 + super().gain(name)

    def join(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        both = [self.norm(embedding, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        return self.linear(torch.cat(both), "fc")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """Every expert, weighted by 0 unless it is among the two likeliest."""
        shared = self.linear(x, f"{name}.shared_expert_gate").sigmoid() * super().mlp(x, f"{name}.shared_expert")
        weights = self.linear(x, f"{name}.gate").softmax(0)
        weights = weights * (weights >= weights.sort().values[-2])
        weights = weights / weights.sum()
        return shared + sum(
            w * super(Qwen3NextDecoder, self).mlp(x, f"{name}.experts.{i}") for i, w in enumerate(weights)
        )

    def attended(self, x: Tensor, position: int, cache: list) -> Tensor:
        q, gate = self.projected(x, "q").view(HEADS, 2, self.head_dim).unbind(1)
        k, v = (self.projected(x, name).view(-1, self.head_dim) for name in "kv")
        q, k = self.norm(q, f"{self.layer}self_attn.q_norm"), self.norm(k, f"{self.layer}self_attn.k_norm")
        cache.append((self.rotate(k, position), v))
        return self.attend(self.rotate(q, position), cache) * gate.flatten().sigmoid()


class Qwen35Decoder(Qwen3NextDecoder):
    mlp = CachedDecoder.mlp


class GlmDecoder(MtpDecoder):
    """What is fed back is the state before the final norm."""

    prefix, layer, output_norm = f"model.layers.{TARGET.num_layers}.", "", "shared_head.norm"
    head_dim, rotary_dim = 8, 4

    def join(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        embedding = embedding if position > 0 else torch.zeros_like(embedding)
        return self.linear(torch.cat([self.norm(embedding, "enorm"), self.norm(hidden, "hnorm")]), "eh_proj")

    def attended(self, x: Tensor, position: int, cache: list) -> Tensor:
        q, k, v = (self.projected(x, name).view(-1, self.head_dim) for name in "qkv")
        q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        cache.append((self.rotate(k, position), v))
        return self.attend(self.rotate(q, position), cache)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """Every expert, weighted by 0 unless it is among the two that score and bias choose."""
        scores = self.linear(x, f"{name}.gate").sigmoid()
        choosing = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        weights = scores * (choosing >= choosing.sort().values[-2])
        weights = 1.5 * weights / weights.sum()
        experts = [super(GlmDecoder, self).mlp(x, f"{name}.experts.{i}") for i in range(len(weights))]
        return super().mlp(x, f"{name}.shared_experts") + sum(
            w * expert for w, expert in zip(weights, experts, strict=True)
        )

    def step(self, embedding: Tensor, hidden: Tensor, position: int, cache: list) -> tuple[Tensor, Tensor]:
        residual = self.join(embedding, hidden, position)
        x = self.norm(residual, "input_layernorm")
        residual = residual + self.linear(self.attended(x, position, cache), "self_attn.o_proj")
        state = residual + self.mlp(self.norm(residual, "post_attention_layernorm"), "mlp")
        return state, self.norm(state, self.output_norm)


DECODERS = {
    MIMO.name: MiMoDecoder,
    QWEN3_NEXT.name: Qwen3NextDecoder,
    QWEN3_5.name: Qwen35Decoder,
    GLM.name: GlmDecoder,
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("kind", MTP_KINDS, ids=kind_name)
@pytest.mark.parametrize("window", [None, 3, 6])
def test_unroll_equals_decoding_with_a_kv_cache(kind, documents, window, target_weights):
    drafter = kind.make(trained_depth=4, sliding_window=window)
    assert_unroll_equals(DECODERS[kind.name](drafter), drafter, make_batch(*documents), target_weights)


@pytest.mark.parametrize(
    ("kind", "is_read"), [(MIMO, False), (QWEN3_NEXT, True), (GLM, False)], ids=["mimo", "qwen3_next", "glm4_moe"]
)
def test_who_reads_the_token_that_is_fed_at_position_0(kind, is_read, target_weights):
    drafter, batch = kind.make(), make_batch((1, 8, 0), (2, 7, 0))
    alignment = align(batch, drafter.shape.trained_depth)
    before = torch.stack(drafter.drafts(batch, alignment, target_weights)[0])
    # Each rollout's second token is fed at position 0 alone.
    batch.token_ids[[1, 10]] = (batch.token_ids[[1, 10]] + 1) % kind.target.vocab_size
    after = torch.stack(drafter.drafts(batch, alignment, target_weights)[0])
    assert torch.equal(before, after) != is_read
    batch.token_ids[2] = (batch.token_ids[2] + 1) % kind.target.vocab_size
    assert not torch.equal(after, torch.stack(drafter.drafts(batch, alignment, target_weights)[0]))
