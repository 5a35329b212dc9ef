"""Bounds of an MTP head's activations, from its weights alone: see drafters/bounds.py."""

from math import sqrt

import torch

from drafters.attention import gain
from drafters.bounds import largest_row, layer_bounds
from drafters.mtp.experts import SparseMLP
from drafters.mtp.layer import MtpHead


def activation_bounds(head: MtpHead) -> dict[str, float]:
    """What can become large, and how large. Logits are left out: the target's head is not this drafter's."""
    layer, size = head.layer, head.joining.out_features
    mlps = list(layer.mlp.mlps()) if isinstance(layer.mlp, SparseMLP) else [layer.mlp]
    bounds = layer_bounds(layer.self_attn, mlps, gain(layer.input_layernorm), gain(layer.post_attention_layernorm))
    if isinstance(layer.mlp, SparseMLP):
        bounds["router logits"] = sqrt(size) * largest_row(layer.mlp.gate.weight, gain(layer.post_attention_layernorm))
    joined = sqrt(2 * size) * largest_row(head.joining.weight, torch.cat([gain(norm) for norm in head.joined_norms]))
    recycled = sqrt(size) * float(gain(head.output_norm).detach().double().abs().max())
    # Norms square and sum what they are given.
    bounds["squared hidden state"] = size * (joined + bounds["attention output"] + bounds["MLP output"]) ** 2
    bounds["squared recycled state"] = size * recycled**2
    return bounds
