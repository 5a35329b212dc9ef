"""The shape of an MTP head and its modules, on packed rows: one class for each checkpoint format.

All heads join the normed embedding of the next token and the normed hidden state into one vector, and run a decoder
layer on it. They differ in tensor names, in the order of the two, and in the layer. Maths and names are those of vLLM's
mimo_mtp.py and qwen3_next_mtp.py. The state after the final norm is what the target's head reads, and what is fed back.

R rows, H hidden size.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from drafters.attention import MLP, Attention, AttentionShape, ZeroCentredRMSNorm
from drafters.base import Experts
from drafters.mtp.experts import SparseMLP

Norm = nn.RMSNorm | ZeroCentredRMSNorm


@dataclass(frozen=True)
class MtpShape:
    """Everything that fixes a head's tensors and its maths; config.json carries the same facts."""

    format: str  # key of drafters.mtp.formats.FORMATS
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # of the target
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    trained_depth: int
    experts: Experts | None = None  # Qwen3-Next's, which have the target's sizes too


class MtpHead(nn.Module, ABC):
    """What the unroll and the bounds need of a head."""

    @property
    @abstractmethod
    def joining(self) -> nn.Linear:
        """From the two normed vectors [R, 2H] to the residual [R, H]."""

    @property
    @abstractmethod
    def joined_norms(self) -> tuple[Norm, Norm]:
        """In the order in which `joining` reads what they norm."""

    @property
    @abstractmethod
    def hidden_columns(self) -> slice:
        """Columns of `joining` that read the hidden state."""

    @property
    @abstractmethod
    def layer(self) -> "Layer":
        """The decoder layer."""

    @property
    @abstractmethod
    def output_norm(self) -> Norm:
        """The final one, after the layer."""

    @abstractmethod
    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Residual [R, H] that enters the decoder layer."""

    @property
    def attention(self) -> Attention:
        """Of the decoder layer."""
        return self.layer.self_attn

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values are projected from, and the residual; [R, H] each."""
        residual = self.join(embeddings, hidden, positions)
        return self.layer.input_layernorm(residual), residual

    def finish(self, attended: Tensor, residual: Tensor, x: Tensor) -> Tensor:
        """Output [R, H] before the final norm, from what each row's heads attended to [R, heads, D]."""
        hidden = residual + self.attention.output(attended, x)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))


class Layer(nn.Module):
    """Norms, attention and MLP of the decoder layer."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: MLP | SparseMLP


class MiMoHead(MtpHead, Layer):
    """model.mtp_layers.0 of MiMo: a Qwen2 layer, [hidden, embedding], no embedding at position 0."""

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(_attention(shape, bias=True))
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = MLP(size, shape.intermediate_size)
        self.final_layernorm = nn.RMSNorm(size, eps=eps)

    @property
    def joining(self) -> nn.Linear:
        return self.input_proj

    @property
    def joined_norms(self) -> tuple[Norm, Norm]:
        return self.hidden_layernorm, self.token_layernorm

    @property
    def hidden_columns(self) -> slice:
        return slice(None, self.input_proj.out_features)

    @property
    def layer(self) -> Layer:
        return self

    @property
    def output_norm(self) -> Norm:
        return self.final_layernorm

    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
        return self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeddings)], dim=-1))


class Qwen3NextLayer(Layer):
    """Full attention with gated output, norms on queries and keys and partial rotation; a mixture of experts."""

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(_attention(shape, gated=True, qk_norm=True))
        self.post_attention_layernorm = ZeroCentredRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        assert shape.experts is not None
        self.mlp = SparseMLP(shape.hidden_size, shape.experts)


class Qwen3NextHead(MtpHead):
    """mtp.* of Qwen3-Next: a layer of its own kind, [embedding, hidden]."""

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(size, eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3NextLayer(shape)])
        self.norm = ZeroCentredRMSNorm(size, eps)

    @property
    def joining(self) -> nn.Linear:
        return self.fc

    @property
    def joined_norms(self) -> tuple[Norm, Norm]:
        return self.pre_fc_norm_embedding, self.pre_fc_norm_hidden

    @property
    def hidden_columns(self) -> slice:
        return slice(self.fc.out_features, None)

    @property
    def layer(self) -> Layer:
        return cast(Layer, self.layers[0])

    @property
    def output_norm(self) -> Norm:
        return self.norm

    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1))


def _attention(shape: MtpShape, bias: bool = False, gated: bool = False, qk_norm: bool = False) -> AttentionShape:
    return AttentionShape(
        input_size=shape.hidden_size,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        rotary_dim=shape.rotary_dim,
        rms_norm_eps=shape.rms_norm_eps,
        bias=bias,
        gated=gated,
        qk_norm=qk_norm,
    )
