"""Weights as vLLM's CPU build (0.32) holds them, packed for its kernels: reading them back exactly, and sharing them."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


def share_packed_weights(model: nn.Module) -> None:
    """Let modules that share a parameter multiply by the same packed copy of it: embedding and head of a model that ties them.

    The layer-wise reload packs what it loads. Nothing is loaded into a tied head, so on CPU it would continue multiplying
    by its packed copy of the first weights. This function can go when vLLM's layerwise.py packs tied heads; 0.32 does not.
    """
    first: dict[int, Any] = {}
    module: Any
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.cpu_linear = first.setdefault(id(module.weight), module).cpu_linear


def unpack(module: Any, width: int, columns: int | None, turn: int) -> tuple[Tensor, Tensor | None]:
    """Read a oneDNN-packed matrix back by multiplying it with unit vectors, which is exact.

    width: input columns of this rank. columns: how many of them to read, others at each turn; None reads all. Returns
    ([out, width], None) or ([out, chosen], chosen).
    """
    chosen = None
    if columns is not None and columns < width:
        # The shuffled order is the same for all turns: each turn is as likely as any other to find a fault in a share of
        # the columns, whatever its pattern.
        order = torch.randperm(width, generator=torch.Generator().manual_seed(0))
        chosen = order[(turn * columns + torch.arange(columns)) % width].sort().values
    units = torch.nn.functional.one_hot(torch.arange(width) if chosen is None else chosen, width)
    return module.cpu_linear(units.to(module.weight.dtype), module.weight, None).t(), chosen


def in_loaded_order(module: Any, leaf: str, tensor: Tensor) -> list[Tensor]:
    """Return a parameter as it was loaded. vLLM's CPU build moves the elements of experts and convolutions around, and pads experts.

    Of a convolution packed for bfloat16 instructions, vLLM keeps an unpacked copy as well, for speculation. Both are returned.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return [tensor]
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    plain = getattr(module, "_cpu_unpacked_conv_weight", None)
    if leaf == "weight" and plain is not None:
        packed = _before_packing(tensor, plain.shape, _custom_ops.causal_conv1d_weight_pack)
        return [plain[:, None], packed[:, None]]
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if leaf in ("w13_weight", "w2_weight") and isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch:

        def pack(expert: Tensor) -> Tensor:
            return _custom_ops.cpu_prepack_moe_weight(expert[None], experts.isa)[0]

        whole = torch.stack([_before_packing(expert, expert.shape, pack) for expert in tensor])
        size = module.moe_config.intermediate_size_per_partition
        return [whole[..., :size] if leaf == "w2_weight" else whole.unflatten(1, (2, -1))[:, :, :size].flatten(1, 2)]
    return [tensor]


def _before_packing(packed: Tensor, shape: torch.Size, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the tensor of `shape` that `pack` has made into `packed`. `pack` must move elements without changing any.

    Where each element went is found by packing the elements' numbers, as many bits at a time as an element has.
    """
    bits = 8 * packed.element_size()
    whole = {16: torch.int16, 32: torch.int32}[bits]
    numbers = torch.arange(prod(shape)).view(shape)
    order = torch.zeros(packed.numel(), dtype=torch.int64)
    for shift in range(0, 32, bits):
        digits = pack((numbers >> shift).to(whole).view(packed.dtype))
        order += (digits.flatten().view(whole).long() & (2**bits - 1)) << shift
    unpacked = torch.empty_like(packed).flatten()
    unpacked[order] = packed.flatten()
    return unpacked.view(shape)
