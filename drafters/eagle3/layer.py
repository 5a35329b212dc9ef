"""The shape of an EAGLE-3 drafter and the modules of its decoder layer, on packed rows.

Who attends to whom is the caller's business.

Maths and tensor names are those of vLLM's Eagle3LlamaForCausalLM (model_executor/models/llama_eagle3.py).
R rows, H hidden size, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class Attention(nn.Module):
    """Projections of grouped-query attention over the concatenated embedding and hidden state [R, 2H]."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        width, size = 2 * shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * size, shape.hidden_size, bias=False)
        self.head_dim = size
        self.rope_theta = shape.rope_theta

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[R, heads, D], rotated to positions [R]."""
        return self._rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), positions)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R, kv heads, D] each; keys rotated to positions [R]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        return self._rotate(keys, positions), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding in the neox layout: dimension i is paired with i + D/2."""
        exponents = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
        angles = (positions[:, None].float() * self.rope_theta**-exponents)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One layer, cut in two where attention mixes rows."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)
        self.norm_before_residual = shape.norm_before_residual

    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the projections [R, 2H], embedding first, and the residual [R, H]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return x, normed if self.norm_before_residual else hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output [R, H] before the final norm, from what each row's heads attended to [R, heads, D]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
