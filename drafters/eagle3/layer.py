"""The shape of an EAGLE-3 drafter and the modules of its decoder layer, on packed rows.

Who attends to whom is the caller's business.

Maths and tensor names are those of vLLM's Eagle3LlamaForCausalLM (model_executor/models/llama_eagle3.py).
R rows, H hidden size, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.attention import MLP, Attention, AttentionShape


@dataclass(frozen=True)
class Eagle3Shape:
    """Everything that fixes a drafter's tensors and its maths; config.json carries the same facts."""

    vocab_size: int  # of the target
    hidden_size: int  # of the target too: the embedding is the target's
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # ascending; id k = Hugging Face hidden_states[k]
    trained_depth: int
    fc_norm: bool
    norm_before_residual: bool


class DecoderLayer(nn.Module):
    """One layer, cut in two where attention mixes rows."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(
            AttentionShape(
                input_size=2 * shape.hidden_size,
                hidden_size=shape.hidden_size,
                num_heads=shape.num_attention_heads,
                num_kv_heads=shape.num_key_value_heads,
                head_dim=shape.head_dim,
                rope_theta=shape.rope_theta,
                rotary_dim=shape.head_dim,
                rms_norm_eps=shape.rms_norm_eps,
            )
        )
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.norm_before_residual = shape.norm_before_residual

    @property
    def attention(self) -> Attention:
        """Its projections, under the name that drafters/unroll.py knows."""
        return self.self_attn

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the projections [R, 2H], embedding first, and the residual [R, H]. All positions are alike."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return x, normed if self.norm_before_residual else hidden

    def finish(self, attended: Tensor, residual: Tensor, x: Tensor) -> Tensor:
        """Output [R, H] before the final norm, from what each row's heads attended to [R, heads, D]."""
        hidden = residual + self.self_attn.output(attended, x)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
