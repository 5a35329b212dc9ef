"""The parts of a Llama-style decoder layer on packed rows. R rows, H hidden size, D head size.

Which rows attend to which is decided in drafters/unroll.py.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.target import TargetSpec


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight, as in Qwen3-Next."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class Attention(nn.Module):
    """Projections of grouped-query attention over inputs of any width.

    gated: zero-centred norms on each head's query and key, and a gate behind each head's query, whose sigmoid
    multiplies the head's output (Qwen3-Next).
    """

    def __init__(self, sizes: TargetSpec, input_size: int, bias: bool = False, gated: bool = False) -> None:
        super().__init__()
        heads, size = sizes.num_attention_heads, sizes.head_dim
        self.sizes, self.gated = sizes, gated
        self.q_proj = nn.Linear(input_size, heads * size * (1 + gated), bias=bias)
        self.k_proj = nn.Linear(input_size, sizes.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, sizes.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, sizes.hidden_size, bias=False)
        if gated:
            self.q_norm = ZeroCentredRMSNorm(size, sizes.rms_norm_eps)
            self.k_norm = ZeroCentredRMSNorm(size, sizes.rms_norm_eps)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[R, heads, D], rotated to positions [R]."""
        queries = F.linear(x, self._query_rows(0)) if self.gated else self.q_proj(x)
        queries = queries.unflatten(-1, (-1, self.sizes.head_dim))
        return self._rotate(self.q_norm(queries) if self.gated else queries, positions)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R, kv heads, D] each; keys rotated to positions [R]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.sizes.head_dim))
        keys = self._rotate(self.k_norm(keys) if self.gated else keys, positions)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.sizes.head_dim))

    def output(self, attended: Tensor, x: Tensor) -> Tensor:
        """[R, H] from what each row's heads attended to [R, heads, D]; x [R, width] is the layer's input."""
        attended = attended.flatten(1)
        if self.gated:
            attended = attended * F.linear(x, self._query_rows(1)).sigmoid()
        return self.o_proj(attended)

    def _query_rows(self, part: int) -> Tensor:
        """Weight of the queries (0) or of the gates (1), which alternate head by head in q_proj."""
        return self.q_proj.weight.unflatten(0, (-1, 2, self.sizes.head_dim))[:, part].flatten(0, 1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first dimensions of each head, i with i + size / 2 (the neox layout); the others pass."""
        size = int(self.sizes.head_dim * self.sizes.partial_rotary_factor)
        exponents = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
        angles = (positions[:, None].float() * self.sizes.rope_theta**-exponents)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :size].chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., size:]], dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A decoder layer that is run again for every draft position, cut in two where attention mixes rows."""

    input_layernorm: nn.Module
    self_attn: Attention
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what queries, keys and values are projected from [R, width], and the residual [R, H]."""
        raise NotImplementedError

    def finish(self, attended: Tensor, residual: Tensor, x: Tensor) -> Tensor:
        """Return the output [R, H] before the final norm, from what each row's heads attended to [R, heads, D]."""
        hidden = residual + self.self_attn.output(attended, x)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
