"""MTP heads on packed rows: one class for each checkpoint format. R rows, H hidden size, D head size.

All heads join the normed embedding of the next token and the normed hidden state into one vector, and run a decoder
layer on it. They differ in tensor names, in the order of the two, and in the layer. Maths and names are those of vLLM's
mimo_mtp.py and qwen3_next_mtp.py. The state after the final norm is what the target's head reads, and what is fed back.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from drafters.attention import MLP, Attention, ZeroCentredRMSNorm
from drafters.mtp.experts import SparseMLP
from drafters.target import TargetSpec

Norm = nn.RMSNorm | ZeroCentredRMSNorm


class Layer(nn.Module):
    """Norms, attention and MLP of the decoder layer."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: MLP | SparseMLP


class MtpHead(nn.Module):
    """A head whose modules have the names that its format gives them, and these names in all formats."""

    joining: nn.Linear  # from the two normed vectors [R, 2H] to the residual [R, H]
    embedding_norm: Norm
    hidden_norm: Norm
    output_norm: Norm  # the final one, after the layer
    hidden_first: ClassVar[bool]  # does `joining` read the hidden state before the embedding?
    parts: ClassVar[dict[str, str]]  # common name -> name in the format

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self.parts.get(name, name))

    @property
    def layer(self) -> Layer:
        """The decoder layer."""
        raise NotImplementedError

    @property
    def attention(self) -> Attention:
        """The attention of the decoder layer."""
        return self.layer.self_attn

    @property
    def hidden_columns(self) -> slice:
        """Columns of `joining` that read the hidden state."""
        size = self.joining.out_features
        return slice(None, size) if self.hidden_first else slice(size, None)

    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Residual [R, H] that enters the decoder layer."""
        normed = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        return self.joining(torch.cat(normed[::-1] if self.hidden_first else normed, dim=-1))

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values are projected from, and the residual; [R, H] each."""
        residual = self.join(embeddings, hidden, positions)
        return self.layer.input_layernorm(residual), residual

    def finish(self, attended: Tensor, residual: Tensor, x: Tensor) -> Tensor:
        """Output [R, H] before the final norm, from what each row's heads attended to [R, heads, D]."""
        hidden = residual + self.attention.output(attended, x)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))


class MiMoHead(MtpHead, Layer):
    """model.mtp_layers.0 of MiMo: a Qwen2 layer, [hidden, embedding], no embedding at position 0."""

    hidden_first = True
    parts: ClassVar = {
        "joining": "input_proj",
        "embedding_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "output_norm": "final_layernorm",
    }

    def __init__(self, sizes: TargetSpec) -> None:
        super().__init__()
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(sizes, size, bias=True)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = MLP(size, sizes.intermediate_size)
        self.final_layernorm = nn.RMSNorm(size, eps=eps)

    @property
    def layer(self) -> Layer:
        return self

    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return super().join(embeddings.masked_fill((positions == 0)[:, None], 0), hidden, positions)


class Qwen3NextLayer(Layer):
    """Full attention with gated output, norms on queries and keys and partial rotation; a mixture of experts."""

    def __init__(self, sizes: TargetSpec) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes, sizes.hidden_size, gated=True)
        self.post_attention_layernorm = ZeroCentredRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        assert sizes.experts is not None
        self.mlp = SparseMLP(sizes.hidden_size, sizes.experts)


class Qwen3NextHead(MtpHead):
    """mtp.* of Qwen3-Next: a layer of its own kind, [embedding, hidden]."""

    hidden_first = False
    parts: ClassVar = {
        "joining": "fc",
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "output_norm": "norm",
    }

    def __init__(self, sizes: TargetSpec) -> None:
        super().__init__()
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(size, eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3NextLayer(sizes)])
        self.norm = ZeroCentredRMSNorm(size, eps)

    @property
    def layer(self) -> Layer:
        return cast(Layer, self.layers[0])
