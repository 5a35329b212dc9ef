"""vLLM's models (0.32): loading weights into them, and reading back what they serve.

vLLM fuses projections, packs matrices and divides them among tensor-parallel ranks; everything here uses the names of
the checkpoint.
"""

import inspect
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from cotrain.engine.cpu_packing import in_loaded_order, share_packed_weights, unpack
from cotrain.engine.load_trace import Box, Loaded, LoadTrace, names_by_module, trace_of
from cotrain.weights.payload import manifest_of


def reload_weights(model: nn.Module, model_config: Any, tensors: dict[str, Tensor]) -> None:
    """Load a whole state dict the way vLLM's own update session does (layer-wise reload), and what that loses as well.

    A plain load_weights fails on CPU, where linear weights live in packed form only. `finish_reload` runs even after an
    error: without it the model is left on the meta device and the next step kills the engine.
    """
    _reload(model, model_config, tensors, [model])


def reload_modules(model: nn.Module, model_config: Any, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of some modules in the same way, and leave all others untouched.

    With the module around each, since attention computes further weights from those of its projections.
    """
    trace = trace_of(model, manifest_of(tensors.items()))
    around = sorted({path.rpartition(".")[0] for path in names_by_module(trace)})
    _reload(model, model_config, tensors, [model.get_submodule(path) for path in around])


def _reload(model: nn.Module, model_config: Any, tensors: dict[str, Tensor], parts: list[nn.Module]) -> None:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    trace = trace_of(model, manifest_of(tensors.items()))
    for part in parts:
        initialize_layerwise_reload(part)
    try:
        with disable_mtp_completeness_check():
            model.load_weights(iter(tensors.items()))
        _load_what_was_lost(model, trace, tensors)
    finally:
        finish_reload(model, model_config, parts)


def _load_what_was_lost(model: nn.Module, trace: LoadTrace, tensors: dict[str, Tensor]) -> None:
    """Load parameters that the model copies into itself, past their loaders, as gpt-oss does with experts and sinks.

    During a reload such copies go to tensors without data, and vLLM then puts the old weights back.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

    def load(param: Tensor, loaded: Loaded) -> None:
        for to, name, source in loaded.copies:
            to.of(param.data).copy_(source.of(tensors[name]))

    traced = {loaded.places[0]: loaded for loaded in trace.loaded}
    for path, module in model.named_modules():
        info = get_layerwise_info(module)
        called, loaders = {leaf for leaf, _ in info.loaded_weights}, {}
        for leaf, tensor in {**module._parameters, **module._buffers}.items():
            if (path, leaf) in traced and leaf not in called and tensor.is_meta:
                loaders[tensor], tensor.weight_loader = tensor.weight_loader, load
                info.loaded_weights.append((leaf, inspect.signature(load).bind(tensor, traced[path, leaf])))
        if loaders:
            _layerwise_process(module, info)
        for tensor, loader in loaders.items():
            tensor.weight_loader = loader


def finish_reload(model: nn.Module, model_config: Any, parts: Iterable[nn.Module] = ()) -> None:
    """End what vLLM's initialize_layerwise_reload has begun, let tied weights share a packed copy, and renew copies of weights.

    parts: the modules for which it was begun; none stands for the whole model.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    for part in parts or [model]:
        finalize_layerwise_reload(part, model_config)
    share_packed_weights(model)
    derive_again(model)


def modules_shared_with_target(draft_model: nn.Module, target_model: nn.Module) -> list[str]:
    """Return the checkpoint-name suffixes of the drafter's modules that are the target's own.

    An update that carried them would overwrite the target through the drafter.
    """
    targets = {id(module) for module in target_model.modules()}
    names = [name for name, module in draft_model.named_modules() if id(module) in targets and name]
    # Drafter checkpoints leave out `model.`, except those that are whole checkpoints, which the suffix matches as well.
    return [f"{name.removeprefix('model.')}.weight" for name in names]


def differing_tensors(
    model: nn.Module, expected: dict[str, Tensor], columns: int | None = None, turn: int = 0
) -> list[str]:
    """Return the names of the tensors that the model does not serve exactly as `expected`. A rank compares its own part.

    columns: how many input columns of matrices that exist in packed form only to compare; None compares all. With successive
    turns, each of n input columns is compared within ceil(n / columns) turns. Names that the model does not serve at all
    are reported too, and those that its loader computes with.
    """
    trace = trace_of(model, manifest_of(expected.items()))
    differing = set(trace.arithmetic)
    copies = derived_copies(model)
    for loaded in trace.loaded:
        for path, leaf in loaded.places:
            module = model.get_submodule(path)
            views = _served_views(module, leaf, loaded, columns, turn)
            if leaf == "weight" and views and (copy := copies.get(id(module))) is not None:
                kept = views[0][0][: loaded.shape[0] - sum(map(len, copy))]
                views.append((torch.cat([kept, *copy]), None))
            for to, name, source in loaded.copies:
                wanted = source.of(expected[name])
                if not views or not all(_is_served(view, chosen, to, wanted) for view, chosen in views):
                    differing.add(name)
    seen = {name for loaded in trace.loaded for _, name, _ in loaded.copies}
    return sorted({*differing, *expected} - (seen - differing))


def _served_views(
    module: Any, leaf: str, loaded: Loaded, columns: int | None, turn: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Every copy of a parameter that is served, as it is loaded; of packed ones some columns, and which. Empty if unreadable."""
    views: list[tuple[Tensor, Tensor | None]] = []
    parameter = getattr(module, leaf)
    if parameter.numel():
        for view in in_loaded_order(module, leaf, parameter.detach()):
            if view.numel() != prod(loaded.shape):
                return []
            views.append((view.reshape(loaded.shape), None))
    if leaf == "weight" and hasattr(module, "cpu_linear"):
        by_row = all(to.stride[-1] == 1 and to.shape[-1] == loaded.shape[-1] for to, _, _ in loaded.copies)
        views.append(unpack(module, loaded.shape[-1], columns if by_row else None, turn))
    return views


def _is_served(view: Tensor, chosen: Tensor | None, to: Box, wanted: Tensor) -> bool:
    """Does the view have `wanted` in a box? chosen: the view has these columns of the parameter alone, and the box whole rows."""
    if chosen is not None:
        width, num = to.shape[-1], len(chosen)
        wanted = wanted.index_select(-1, chosen)
        stride = (*(step // width * num for step in to.stride[:-1]), 1)
        to = Box((*to.shape[:-1], num), stride, to.offset // width * num)
    return torch.equal(to.of(view).cpu().to(wanted.dtype), wanted)


def derived_copies(model: nn.Module) -> dict[int, list[Tensor]]:
    """Return the rows that a model has copied of a module's weight, by the module's id: all of them or the last ones, in parts.

    Some models make copies of weights when they are loaded, and compute with these in place of the weights.
    """
    module: Any
    copies: dict[int, list[Tensor]] = {}
    for module in model.modules():
        if hasattr(module, "W_UV"):  # of its N heads, latent attention has copies [N, P, L] and [N, L, V]
            heads = zip(module.W_UK_T, module.W_UV.mT, strict=True)
            copies[id(module.kv_b_proj)] = [rows for head in heads for rows in head]
    for module in _block_drafters(model):
        copies[id(module.hidden_norm)] = [module._hidden_norm_weight]
        # Keys and values of all layers lie in one matrix, with which a block drafter reads its context.
        projections = module._fused_kv_weight.chunk(len(module.layers))
        for layer, norm, projection in zip(module.layers, module._k_norm_weights, projections, strict=True):
            copies[id(layer.self_attn.k_norm)] = [norm]
            copies[id(layer.self_attn.qkv_proj)] = [projection]
    return copies


def derive_again(model: nn.Module) -> None:
    """Make the copies again that a layer-wise reload leaves as they were before it.

    A block drafter makes them at the end of load_weights, when not all weights are in their place yet.
    """
    for drafter in _block_drafters(model):
        drafter._build_fused_kv_buffers()


def _block_drafters(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "_build_fused_kv_buffers"))
