"""Copies of weights that vLLM's models (0.32) make when they are loaded, and compute with in place of the weights."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Copy = Callable[[Tensor], Tensor]
"""Returns a copy in the layout of the weight, from the weight as it is served; the copy may be of some of its rows alone."""


def derived_copies(model: nn.Module) -> dict[int, Copy]:
    """Return what reads the copy of a module's weight, by the module's id, of all that have one."""
    module: Any
    copies: dict[int, Copy] = {
        id(module.kv_b_proj): partial(_of_latent_attention, module)
        for module in model.modules()
        if hasattr(module, "W_UV")
    }
    for module in _block_drafters(model):
        copies[id(module.hidden_norm)] = partial(_of_context_norm, module)
        for number, layer in enumerate(module.layers):
            copies[id(layer.self_attn.k_norm)] = partial(_of_key_norm, module, number)
            copies[id(layer.self_attn.qkv_proj)] = partial(_of_context_projection, module, number)
    return copies


def derive_again(model: nn.Module) -> None:
    """Make the copies again that a layer-wise reload leaves as they were before it.

    A block drafter makes them at the end of load_weights, when not all weights are in their place yet.
    """
    for drafter in _block_drafters(model):
        drafter._build_fused_kv_buffers()


def _block_drafters(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "_build_fused_kv_buffers"))


def _of_latent_attention(attention: Any, _: Tensor) -> Tensor:
    """Latent attention multiplies by two copies of its own: [N, P, L] and [N, L, V] of N heads."""
    return torch.cat([attention.W_UK_T, attention.W_UV.mT], 1).flatten(0, 1)


def _of_context_norm(drafter: Any, _: Tensor) -> Tensor:
    return drafter._hidden_norm_weight


def _of_key_norm(drafter: Any, number: int, _: Tensor) -> Tensor:
    return drafter._k_norm_weights[number]


def _of_context_projection(drafter: Any, number: int, served: Tensor) -> Tensor:
    """The rows of keys and values of all layers lie in one matrix, with which a block drafter reads its context."""
    first = drafter.layers[number].self_attn.q_size
    size = len(served) - first
    return torch.cat([served[:first], drafter._fused_kv_weight[number * size : (number + 1) * size]])
