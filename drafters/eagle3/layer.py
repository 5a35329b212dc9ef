"""The shape of an EAGLE-3 drafter and its decoder layer, on packed rows. R rows, H hidden size.

Maths and tensor names are those of vLLM's Eagle3LlamaForCausalLM (model_executor/models/llama_eagle3.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.attention import MLP, Attention, DraftLayer
from drafters.base import Shape


@dataclass(frozen=True)
class Eagle3Shape(Shape):
    """Heads, MLP, rotation and positions of `sizes` are the drafter's own."""

    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # ascending; id k = Hugging Face hidden_states[k]
    fc_norm: bool
    norm_before_residual: bool


class DecoderLayer(DraftLayer):
    """The layer; its attention reads the normed embedding and the normed hidden state side by side."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        size, eps = shape.sizes.hidden_size, shape.sizes.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(shape.sizes, input_size=2 * size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = MLP(size, shape.sizes.intermediate_size)
        self.norm_before_residual = shape.norm_before_residual

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return x, normed if self.norm_before_residual else hidden
