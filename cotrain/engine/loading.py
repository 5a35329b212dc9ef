"""vLLM's models (0.32): loading weights into them, reading back what they serve, and the receiving end of updates.

vLLM fuses projections, packs matrices and divides them among tensor-parallel ranks; everything here uses the names of
the checkpoint.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cotrain.engine.cpu_packing import in_loaded_order, share_packed_weights, unpack
from cotrain.weights.served import ServedWeights

T = TypeVar("T")


class ModelWeights(ServedWeights):
    """What one of vLLM's models serves, on one tensor-parallel rank."""

    def __init__(self, model: nn.Module, model_config: Any, kept: Path, target: nn.Module | None = None):
        """kept: see ServedWeights. target: the policy's model beside which a drafter serves; None for the policy itself."""
        self.model, self._model_config = model, model_config
        never_sent = ["rotary_emb.inv_freq"]
        if target is not None:
            never_sent += ["t2d", *modules_shared_with_target(model, target)]
        elif getattr(model_config.hf_text_config, "tie_word_embeddings", False):
            never_sent += ["lm_head.weight"]
        super().__init__(Path(model_config.model), model_config.dtype, never_sent, kept, is_drafter=target is not None)

    def load(self, tensors: dict[str, Tensor]) -> None:
        reload_weights(self.model, self._model_config, tensors)

    def differing(self, tensors: dict[str, Tensor], columns: int | None = None, turn: int = 0) -> list[str]:
        return differing_tensors(self.model, tensors, columns, turn)

    def of_all_ranks(self, value: T) -> list[T]:
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        values = [value] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values


def reload_weights(model: nn.Module, model_config: Any, tensors: dict[str, Tensor]) -> None:
    """Load a whole state dict the way vLLM's own update session does (layer-wise reload).

    A plain load_weights fails on CPU, where linear weights live in packed form only. `finish_reload` runs even after an
    error: without it the model is left on the meta device and the next step kills the engine.
    """
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        with disable_mtp_completeness_check():
            model.load_weights(iter(tensors.items()))
    finally:
        finish_reload(model, model_config)


def finish_reload(model: nn.Module, model_config: Any) -> None:
    """End what vLLM's initialize_layerwise_reload has begun, and let tied weights share a packed copy."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    share_packed_weights(model)


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
    are reported too.
    """
    unseen = set(expected)
    differing = []
    for name, served, wanted in served_tensors(model, expected, columns, turn):
        if not torch.equal(served.cpu().to(wanted.dtype), wanted):
            differing.append(name)
        unseen.discard(name)
    return sorted({*differing, *unseen})


def served_tensors(
    model: nn.Module, expected: dict[str, Tensor], columns: int | None = None, turn: int = 0
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (checkpoint name, tensor exactly as served, what it should be) for each of `expected` that the model holds.

    A tied weight is yielded once for each module that uses it, because each may hold a packed copy of its own.
    """
    by_served_name = _by_served_name(model, expected)
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(prefix="", recurse=False):
            full_name = f"{prefix}.{leaf}" if prefix else leaf
            views: list[tuple[Tensor, Tensor | None]] = []
            if parameter.numel():
                full_name = first_names.setdefault(id(parameter), full_name)
                views += [(tensor, None) for tensor in in_loaded_order(module, leaf, parameter.detach())]
            if leaf == "weight" and hasattr(module, "cpu_linear"):
                views.append(unpack(module, columns, turn))
            for tensor, chosen in views:
                for name, part in _unfused(full_name, module, tensor):
                    if name in by_served_name:
                        whole = expected[by_served_name[name]]
                        wanted = whole if chosen is None else whole.index_select(1, chosen)
                        yield by_served_name[name], part, _part_of_this_rank(wanted, module, part.shape)


def _part_of_this_rank(whole: Tensor, module: Any, shape: Sequence[int]) -> Tensor:
    from vllm.distributed import get_tp_group

    if hasattr(module, "shard_indices"):  # vLLM pads a vocabulary before it is divided
        return whole[module.shard_indices.org_vocab_start_index : module.shard_indices.org_vocab_end_index]
    return part_of_rank(whole, shape, get_tp_group().rank_in_group, get_tp_group().world_size)


def part_of_rank(whole: Tensor, shape: Sequence[int], rank: int, num_ranks: int) -> Tensor:
    """Return what one rank should serve of a checkpoint's tensor, where it serves a tensor of `shape`.

    Ranks have successive parts of equal size. If there are fewer parts than ranks, as with the heads of keys and values,
    neighbouring ranks have the same part. A tensor that is divided in another way comes back with other values, or in
    another shape, than is served.
    """
    for dim, (size, part) in enumerate(zip(whole.shape, shape, strict=False)):
        if part and size % part == 0 and num_ranks % (num_parts := size // part) == 0:
            whole = whole.narrow(dim, rank // (num_ranks // num_parts) * part, part)
    return whole


def _by_served_name(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the checkpoint name of each tensor, by the name it has in the model.

    Names are mapped as the model maps them, but without fusing projections, which `_unfused` undoes. Drafters may leave out
    `model.`, and Qwen3-Next's MTP head renames `mtp.` in its load_weights.
    """
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = getattr(model, "hf_to_vllm_mapper", None) or WeightsMapper()
    renaming = WeightsMapper(
        orig_to_new_substr=mapper.orig_to_new_substr, orig_to_new_prefix={**mapper.orig_to_new_prefix, "mtp.": "model."}
    )
    found: dict[str, str] = {}
    for name in names:
        served = renaming.apply_list([name])[0]
        found |= {served: name, f"model.{served}": name}
    return found


def _unfused(name: str, module: Any, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Split vLLM's fused projections into the checkpoint's tensors and drop vocabulary padding."""
    if ".routed_experts." in name:
        return _single_experts(name, module, tensor)
    if ".qkv_proj." in name:
        heads, kv_heads, size = module.num_heads, module.num_kv_heads, module.head_size
        parts = tensor.split([heads * size, kv_heads * size, kv_heads * size])
        return [(name.replace(".qkv_proj.", f".{p}_proj."), part) for p, part in zip("qkv", parts, strict=True)]
    if ".gate_up_proj." in name:
        parts = tensor.chunk(2)
        return [(name.replace(".gate_up_proj.", f".{p}_proj."), t) for p, t in zip(("gate", "up"), parts, strict=True)]
    if name.endswith("draft_id_to_target_id"):
        return [("d2t", tensor)]
    if hasattr(module, "shard_indices"):
        return [(name, tensor[: module.shard_indices.num_org_elements])]
    return [(name, tensor)]


def _single_experts(name: str, module: Any, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the checkpoint's matrices of E experts. tensor: [E, 2I, H], gate above up, or [E, H, I]; I may be padded."""
    size = module.moe_config.intermediate_size_per_partition
    mixture, _, leaf = name.rpartition("routed_experts.")
    if leaf == "w2_weight":
        return [(f"{mixture}{i}.down_proj.weight", expert[:, :size]) for i, expert in enumerate(tensor)]
    found = []
    for i, expert in enumerate(tensor):
        gate, up = expert.chunk(2)
        found += [(f"{mixture}{i}.gate_proj.weight", gate[:size]), (f"{mixture}{i}.up_proj.weight", up[:size])]
    return found
