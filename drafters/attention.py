"""Attention, MLP and norms of a Llama-style decoder layer on packed rows, as drafters put them together.

Who attends to whom is the caller's business: see drafters/unroll.py. R rows, H hidden size, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class AttentionShape:
    """What fixes the projections of one attention layer."""

    input_size: int  # width of what queries, keys and values are projected from
    hidden_size: int  # width of the output
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int  # the first dimensions of a head are rotated, in the neox layout: i is paired with i + rotary_dim/2
    rms_norm_eps: float
    bias: bool = False  # of queries, keys and values
    gated: bool = False  # each head's query is followed by a gate, whose sigmoid multiplies the head's output
    qk_norm: bool = False  # zero-centred RMSNorm on each head's query and key


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight, as in Qwen3-Next."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def gain(norm: nn.RMSNorm | ZeroCentredRMSNorm) -> Tensor:
    """What a norm multiplies the normed values with, [size]."""
    return 1 + norm.weight if isinstance(norm, ZeroCentredRMSNorm) else norm.weight


class Attention(nn.Module):
    """Projections of grouped-query attention."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        width, size = shape.input_size, shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(width, shape.num_heads * size * (1 + shape.gated), bias=shape.bias)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * size, bias=shape.bias)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * size, bias=shape.bias)
        self.o_proj = nn.Linear(shape.num_heads * size, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm = ZeroCentredRMSNorm(size, shape.rms_norm_eps)
            self.k_norm = ZeroCentredRMSNorm(size, shape.rms_norm_eps)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[R, heads, D], rotated to positions [R]."""
        queries = F.linear(x, *self._query_rows(0)) if self.shape.gated else self.q_proj(x)
        queries = queries.unflatten(-1, (-1, self.shape.head_dim))
        return self._rotate(self.q_norm(queries) if self.shape.qk_norm else queries, positions)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R, kv heads, D] each; keys rotated to positions [R]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        keys = self._rotate(self.k_norm(keys) if self.shape.qk_norm else keys, positions)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))

    def output(self, attended: Tensor, x: Tensor) -> Tensor:
        """[R, H] from what each row's heads attended to [R, heads, D]; x [R, width] is the layer's input."""
        attended = attended.flatten(1)
        if self.shape.gated:
            attended = attended * F.linear(x, *self._query_rows(1)).sigmoid()
        return self.o_proj(attended)

    def _query_rows(self, part: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the queries (0) or of the gates (1), which alternate head by head in q_proj."""
        weight, bias = (
            None if t is None else t.unflatten(0, (-1, 2, self.shape.head_dim))[:, part].flatten(0, 1)
            for t in (self.q_proj.weight, self.q_proj.bias)
        )
        assert weight is not None
        return weight, bias

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of the first rotary_dim dimensions; the others pass."""
        size = self.shape.rotary_dim
        exponents = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
        angles = (positions[:, None].float() * self.shape.rope_theta**-exponents)[:, None]
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
