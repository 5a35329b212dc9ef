"""MTP heads on packed rows: one class for each checkpoint format. R rows, H hidden size.

All heads join the normed embedding of the next token and the normed hidden state into one vector, and run a decoder
layer on it. They differ in tensor names, in the order of the two, and in the layer. Maths and names are those of vLLM's
mimo_mtp.py and qwen3_next_mtp.py. The state after the final norm is what the target's head reads, and what is fed back.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafters.attention import MLP, Attention, DraftLayer, ZeroCentredRMSNorm
from drafters.mtp.experts import SparseMLP
from drafters.target import TargetSpec


class MtpHead(DraftLayer):
    """A head whose modules have the names that its format gives them, and these names in all formats."""

    joining: nn.Linear  # from the two normed vectors [R, 2H] to the residual [R, H]
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    output_norm: nn.Module  # the final one, after the layer
    hidden_first: ClassVar[bool]  # does `joining` read the hidden state before the embedding?
    parts: ClassVar[dict[str, str]]  # common name -> name in the format

    def __getattr__(self, name: str) -> Any:
        return self.get_submodule(self.parts[name]) if name in self.parts else super().__getattr__(name)

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
        residual = self.join(embeddings, hidden, positions)
        return self.input_layernorm(residual), residual


class MiMoHead(MtpHead):
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

    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return super().join(embeddings.masked_fill((positions == 0)[:, None], 0), hidden, positions)


class Qwen3NextHead(MtpHead):
    """mtp.* of Qwen3-Next: [embedding, hidden], gated full attention with partial rotation, a mixture of experts."""

    hidden_first = False
    parts: ClassVar = {
        "joining": "fc",
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "output_norm": "norm",
        **{name: f"layers.0.{name}" for name in DraftLayer.__annotations__},
    }

    def __init__(self, sizes: TargetSpec) -> None:
        super().__init__()
        assert sizes.experts is not None
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(size, eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        layer = {
            "input_layernorm": ZeroCentredRMSNorm(size, eps),
            "self_attn": Attention(sizes, size, gated=True),
            "post_attention_layernorm": ZeroCentredRMSNorm(size, eps),
            "mlp": SparseMLP(size, sizes.experts),
        }
        self.layers = nn.ModuleList([nn.ModuleDict(layer)])
        self.norm = ZeroCentredRMSNorm(size, eps)
