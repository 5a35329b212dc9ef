"""How large can a drafter's activations become, for any input? A bound from its weights alone.

Keys and values that overflow stay in an engine's KV cache and spoil drafting under the next, sound drafter as well, so
that finite weights are not enough. The input of every projection has passed an RMSNorm: each normed part of H values has
a norm of at most sqrt(H). With the norm's gain g, |W x|_i <= |W_i * g| sqrt(H) (Cauchy-Schwarz), and so on through
the layer. No input is needed, and a drafter within the bounds is finite on all of them.
"""

from math import sqrt

import torch
from torch import Tensor

from drafters.eagle3.layer import DecoderLayer, Eagle3Shape

LARGEST = float(torch.finfo(torch.bfloat16).max) / 2
"""bfloat16 and float32 end at (almost) the same number; half of it leaves room for rounding."""


def overflowing(shape: Eagle3Shape, layer: DecoderLayer, state: dict[str, Tensor]) -> list[str]:
    """What can become larger than the serving format holds, each with its bound; empty for a sound drafter.

    Without any norm before the residual the hidden state is as large as the target's, and is left out.
    """
    bounds = _bounds(shape, layer, state)
    return [f"{name} up to {bound:.1g}" for name, bound in bounds.items() if not bound <= LARGEST]


def _bounds(shape: Eagle3Shape, layer: DecoderLayer, state: dict[str, Tensor]) -> dict[str, float]:
    hidden_size, attention = shape.hidden_size, layer.self_attn
    gains = torch.cat([layer.input_layernorm.weight, layer.hidden_norm.weight])
    length = sqrt(2 * hidden_size)
    queries, keys, values = (
        length * _largest_row(projection.weight, gains)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    heads = shape.num_attention_heads * shape.head_dim
    attended = sqrt(heads) * values * _largest_row(attention.o_proj.weight)
    gain = layer.post_attention_layernorm.weight
    gate, up = (sqrt(hidden_size) * _largest_row(p.weight, gain) for p in (layer.mlp.gate_proj, layer.mlp.up_proj))
    mlp = sqrt(shape.intermediate_size) * gate * up * _largest_row(layer.mlp.down_proj.weight)
    bounds = {
        "keys": sqrt(2) * keys,  # rotation mixes two of them
        "values": values,
        "attention scores": 2 * shape.head_dim * queries * keys,
        "attention output": attended,
        "MLP output": mlp,
        "logits": sqrt(hidden_size) * _largest_row(state["lm_head.weight"], state["norm.weight"]),
    }
    first = _first_residual(shape, layer, state)
    if first is not None:
        # Each draft position adds to the state it was given, and a norm squares and sums the result.
        bounds["squared hidden state"] = hidden_size * (first + shape.trained_depth * (attended + mlp)) ** 2
    return bounds


def _first_residual(shape: Eagle3Shape, layer: DecoderLayer, state: dict[str, Tensor]) -> float | None:
    """Bound of the state that the layer's output is added to; None where it depends on the target alone."""
    if shape.norm_before_residual:
        return sqrt(shape.hidden_size) * float(layer.hidden_norm.weight.detach().abs().max())
    if not shape.fc_norm:
        return None
    gains = torch.cat([state[f"fc_norm.{i}.weight"] for i in range(len(shape.aux_layers))])
    return sqrt(len(gains)) * _largest_row(state["fc.weight"], gains)


def _largest_row(weight: Tensor, gains: Tensor | None = None) -> float:
    """Largest norm of the rows of `weight`, its columns times `gains`; NaN when a value is."""
    weight = weight.detach().double()
    return float((weight if gains is None else weight * gains.detach().double()).norm(dim=1).max())
