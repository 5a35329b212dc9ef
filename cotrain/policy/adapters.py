"""Low-rank adapters (LoRA) that train in place of the policy's weights, made by peft.

An adapted matrix W [out, in] acts as W + alpha / rank * B A, with A [rank, in] and B [out, rank]. Engines get this sum, computed in
float32 while it is sent, as peft's own merge computes it. It is never stored: merging in place and taking out again changes W by
rounding. B begins at 0, so that the first policy is the base model.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cotrain.config.schema import LoraConfig
from cotrain.weights.payload import manifest_of, save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the head."""

OF_MLPS = tuple(f".{name}" for name in ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"))
"""Endings that peft takes for those of experts, as checkpoints name them."""

ADAPTER = "default"
"""peft's name of the adapter."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a folder that peft writes."""

PEFT_PREFIX = "base_model.model."
"""What peft puts before the name of each tensor in an adapter's file."""


def add_adapters(model: "PreTrainedModel", lora: LoraConfig, base_name: str, seed: int) -> None:
    """Add new adapters to a model, of which nothing else will train. base_name: the base model, as the adapters' file names it.

    Raises ValueError naming policy.lora.target_modules when they fit none of its modules, or also embedding or head, which the drafter
    shares.
    """
    import peft

    field = f"policy.lora.target_modules: {lora.target_modules!r}"
    matrices = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    try:
        settings = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=_targets(model, lora.target_modules),
            task_type="CAUSAL_LM",
            base_model_name_or_path=base_name,
        )
        with torch.random.fork_rng(devices=[]):  # all ranks draw the same A
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(settings, model, ADAPTER)
    except ValueError as error:
        raise ValueError(
            f"{field} fits no module of the model ({error}); name its projections, for example q_proj"
        ) from error
    if matrices & {id(layer.get_base_layer()) for _, layer in adapted_layers(model)}:
        raise ValueError(
            f"{field} has embedding or head, which the drafter shares; name projections of the layers alone"
        )


def _targets(model: "PreTrainedModel", names: str | tuple[str, ...]) -> str | list[str]:
    """Return what peft is told. In a model with experts, these are paths of layers outside its MLPs, whose names mean experts to peft.

    Raises ValueError for names of layers inside them.
    """
    if not any("experts" in path.split(".") for path, _ in model.named_modules()):
        return names if isinstance(names, str) else list(names)
    head = model.get_output_embeddings()
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if names == ALL_LINEAR:
        return [path for path in linear if not path.endswith(OF_MLPS)]
    if isinstance(names, str):
        paths = [path for path in linear if re.fullmatch(names, path)]
    else:
        paths = [path for path in linear if f".{path}".endswith(tuple(f".{name}" for name in names))]
    if any(path.endswith(OF_MLPS) for path in paths) or not paths:
        raise ValueError("in a model with experts, only layers outside its MLPs get adapters")
    return paths


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of each layer with an adapter; nothing for a model without adapters."""
    return ((path, module) for path, module in model.named_modules() if hasattr(module, "lora_A"))


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers by the name that their weight has in the base model."""
    return {f"{path}.weight": layer for path, layer in adapted_layers(model)}


def base_tensors(model: "PreTrainedModel") -> Iterator[tuple[str, Tensor]]:
    """Yield the state of the base model, by the names that it has without adapters."""
    for name, tensor in model.state_dict().items():
        if not _is_adapter(name):
            yield name.replace(".base_layer.", "."), tensor


def merged(weight: Tensor, layer: Any, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Return W + alpha / rank * B A of an adapted layer, [out, in] float32. whole: gathers a tensor that is sharded."""
    low, high = whole(layer.lora_A[ADAPTER].weight.detach()), whole(layer.lora_B[ADAPTER].weight.detach())
    return whole(weight) + (high @ low) * layer.scaling[ADAPTER]


def touched_modules(model: nn.Module) -> set[str]:
    """Return the paths of the modules that hold adapted layers, such as an attention block, of which engines fuse several matrices."""
    return {path.rpartition(".")[0] for path, _ in adapted_layers(model)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let the model compute as its base. Whether a parameter trains is left alone, unlike peft's own way, as FSDP keeps its own copy."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapters(model: nn.Module, folder: Path, whole: Callable[[Tensor], Tensor], is_main: bool) -> None:
    """Write a folder as peft does, in float32. Collective; rank 0 writes."""
    named = {name: whole(tensor.detach()) for name, tensor in model.state_dict().items() if _is_adapter(name)}
    if is_main:
        peft_config: Any = model.peft_config
        peft_config[ADAPTER].save_pretrained(folder)
        files = {PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): tensor for name, tensor in named.items()}
        save_tensors(manifest_of(files.items()), files.items(), folder / ADAPTER_WEIGHTS)


def read_adapters(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Read adapters that save_adapters wrote, by the model's names. Raises ValueError when they are of another shape."""
    saved = load_file(folder / ADAPTER_WEIGHTS)
    own = {name: PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".") for name in model.state_dict() if _is_adapter(name)}
    if {*own.values()} != saved.keys():
        differing = sorted({*own.values()} ^ saved.keys())
        raise ValueError(f"{folder / ADAPTER_WEIGHTS} has other adapters than policy.lora: {differing[:4]}")
    return {name: saved[of_peft] for name, of_peft in own.items()}


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
