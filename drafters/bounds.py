"""How large can a drafter's activations become, for any input? A bound from its weights alone.

Keys and values that overflow stay in an engine's KV cache and spoil drafting under the next, sound drafter as well, so
that finite weights are not enough. The input of every projection has passed an RMSNorm: each normed part of H values has
a norm of at most sqrt(H). With the norm's gain g, |W x|_i <= |W_i * g| sqrt(H) (Cauchy-Schwarz), and so on through
the layer. No input is needed, and a drafter within the bounds is finite on all of them.
"""

from collections.abc import Iterable, Mapping
from math import sqrt

import torch
from torch import Tensor

from drafters.attention import MLP, Attention, gain

LARGEST = float(torch.finfo(torch.bfloat16).max) / 2
"""bfloat16 and float32 end at (almost) the same number; half of it leaves room for rounding."""


def overflowing(state: Mapping[str, Tensor], bounds: Mapping[str, float]) -> list[str]:
    """What is no number, and what can become larger than the serving format holds; empty for a sound drafter."""
    broken = [f"{name} is not finite" for name, t in state.items() if t.is_floating_point() and not t.isfinite().all()]
    return broken or [f"{name} up to {bound:.1g}" for name, bound in bounds.items() if not bound <= LARGEST]


def layer_bounds(attention: Attention, mlps: Iterable[MLP], input_gains: Tensor, mlp_gains: Tensor) -> dict[str, float]:
    """Bounds inside one decoder layer of finite weights.

    input_gains: of the norms whose joined output is projected to queries, keys and values; mlp_gains: of the norm
    before the MLPs, whose outputs are added with weights of at most 1.
    """
    shape = attention.shape
    length = sqrt(len(input_gains))
    queries, keys, values = (
        length * largest_row(projection.weight, input_gains) + _largest(projection.bias)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if shape.qk_norm:
        # A norm still squares and sums what it is given: it stays among the bounds as it is.
        queries, keys = (max(b, sqrt(shape.head_dim) * _largest(gain(norm)))
                         for b, norm in ((queries, attention.q_norm), (keys, attention.k_norm)))  # fmt: skip
    attended = sqrt(shape.num_heads * shape.head_dim) * values * largest_row(attention.o_proj.weight)
    return {
        "keys": sqrt(2) * keys,  # rotation mixes two of them
        "values": values,
        "attention scores": 2 * shape.head_dim * queries * keys,
        "attention output": attended,
        "MLP output": sum(_mlp_bound(mlp, mlp_gains) for mlp in mlps),
    }


def _mlp_bound(mlp: MLP, gains: Tensor) -> float:
    gate, up = (sqrt(len(gains)) * largest_row(p.weight, gains) for p in (mlp.gate_proj, mlp.up_proj))
    return sqrt(mlp.gate_proj.out_features) * gate * up * largest_row(mlp.down_proj.weight)


def largest_row(weight: Tensor, gains: Tensor | None = None) -> float:
    """Largest norm of the rows of `weight`, its columns times `gains`; NaN when a value is."""
    weight = weight.detach().double()
    return float((weight if gains is None else weight * gains.detach().double()).norm(dim=1).max())


def _largest(values: Tensor | None) -> float:
    return 0.0 if values is None else float(values.detach().double().abs().max())
