"""Bounds of an EAGLE-3 drafter's activations, from its weights alone: see drafters/bounds.py."""

from math import sqrt

import torch
from torch import Tensor

from drafters.bounds import largest_row, layer_bounds
from drafters.eagle3.layer import DecoderLayer, Eagle3Shape


def activation_bounds(shape: Eagle3Shape, layer: DecoderLayer, state: dict[str, Tensor]) -> dict[str, float]:
    """What can become large, and how large.

    Without any norm before the residual the hidden state is as large as the target's, and is left out.
    """
    gains = torch.cat([layer.input_layernorm.weight, layer.hidden_norm.weight])
    bounds = layer_bounds(layer.self_attn, [layer.mlp], gains, layer.post_attention_layernorm.weight)
    bounds["logits"] = sqrt(shape.hidden_size) * largest_row(state["lm_head.weight"], state["norm.weight"])
    first = _first_residual(shape, layer, state)
    if first is not None:
        # Each draft position adds to the state it was given, and a norm squares and sums the result.
        step = bounds["attention output"] + bounds["MLP output"]
        bounds["squared hidden state"] = shape.hidden_size * (first + shape.trained_depth * step) ** 2
    return bounds


def _first_residual(shape: Eagle3Shape, layer: DecoderLayer, state: dict[str, Tensor]) -> float | None:
    """Bound of the state that the layer's output is added to; None where it depends on the target alone."""
    if shape.norm_before_residual:
        return sqrt(shape.hidden_size) * float(layer.hidden_norm.weight.detach().abs().max())
    if not shape.fc_norm:
        return None
    gains = torch.cat([state[f"fc_norm.{i}.weight"] for i in range(len(shape.aux_layers))])
    return sqrt(len(gains)) * largest_row(state["fc.weight"], gains)
