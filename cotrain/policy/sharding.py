"""Support for FSDP2 policies: sharding them, writing weights parameter by parameter, and checkpoints.

The functions that take a model also work when each rank holds the whole policy. All ranks must call a function that is
marked as collective; under FSDP, the ranks wait for each other in it.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cotrain.policy import adapters
from cotrain.weights.digests import SUFFIX, DigestedFile
from cotrain.weights.payload import Manifest, manifest_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cotrain.policy.log_probs import ResponseLogProbs

T = TypeVar("T")

OPTIMIZER_STATE = "optimizer"
"""Folder in a checkpoint that holds the optimizer state, in the format of torch.distributed.checkpoint."""

# torch.distributed.checkpoint warns when a process without a process group saves or loads, which is intended here.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def shard(policy: "ResponseLogProbs") -> None:
    """Shard a policy with FSDP2, layer by layer."""
    layers = policy.model._no_split_modules or ()
    for module in reversed(list(policy.modules())):  # inner ones first
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(policy)
    register_fsdp_forward_method(policy, "with_weights")


def whole_tensors(
    model: "PreTrainedModel", dtype: torch.dtype, names: set[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors by checkpoint name, without tied duplicates; floating-point tensors are cast to `dtype`.

    Adapters are merged. names: yield only these. Collective: each parameter is cast, gathered from all ranks and released before the
    next one; an adapted one is gathered and merged in float32 and cast afterwards.
    """
    adapted = adapters.adapters_of(model)

    def served(name: str, tensor: Tensor) -> Tensor:
        if name in adapted:
            return adapters.merged(tensor, adapted[name], whole).to(dtype)
        return whole(tensor.to(dtype if tensor.is_floating_point() else tensor.dtype))

    return _converted(model, served, names)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor from all ranks if it is sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_weights(
    model: "PreTrainedModel",
    dtype: torch.dtype,
    write: Callable[[Manifest, Iterator[tuple[str, Tensor]]], T],
    names: set[str] | None = None,
) -> T | None:
    """On rank 0, write the tensors of whole_tensors and return what `write` does. Other ranks return None.

    Collective. Raises OSError when the disk is full.
    """
    tensors = whole_tensors(model, dtype, names)
    try:
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            return write(layout(model, dtype, names), tensors)
        return None
    finally:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            for _ in tensors:  # all ranks must gather all tensors, even after a full disk on rank 0
                pass


class _DigestedFiles(FileSystem):
    """The files of torch.distributed.checkpoint, as DigestedFile writes them."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with DigestedFile(os.fspath(path)) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        for suffix in ("", SUFFIX):
            os.replace(f"{os.fspath(path)}{suffix}", f"{os.fspath(new_path)}{suffix}")


def save_optimizer(model: "PreTrainedModel", optimizer: Optimizer, folder: Path) -> None:
    """Write the optimizer state by parameter name, each rank its part; write nothing before the first step. Collective."""
    if optimizer.state:
        writer = FileSystemWriter(folder / OPTIMIZER_STATE, sync_files=False)  # DigestedFile flushes them
        writer.fs = _DigestedFiles()
        checkpoint.save(get_optimizer_state_dict(model, optimizer), storage_writer=writer)


def load_optimizer(model: "PreTrainedModel", optimizer: Optimizer, folder: Path) -> None:
    """Load an optimizer state that any number of ranks saved, sharded or not; clear it if there is none. Collective."""
    optimizer.state.clear()
    if (folder / OPTIMIZER_STATE).is_dir():
        state = get_optimizer_state_dict(model, optimizer)
        checkpoint.load(state, checkpoint_id=folder / OPTIMIZER_STATE)
        set_optimizer_state_dict(model, optimizer, state)


def _empty(name: str, tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _converted(
    model: "PreTrainedModel", of: Callable[[str, Tensor], Tensor], names: set[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `of` makes of each tensor of the base model, by checkpoint name. names: only these."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(model.all_tied_weights_keys)
    for name, tensor in adapters.base_tensors(model):
        if name in tied:
            continue
        if names is None or names & revert_weight_conversion(model, {name: _empty(name, tensor)}).keys():
            yield from revert_weight_conversion(model, {name: of(name, tensor.detach())}).items()


def layout(model: "PreTrainedModel", dtype: torch.dtype, names: set[str] | None = None) -> Manifest:
    """Return the shape and dtype of each tensor that whole_tensors yields, without gathering anything."""
    return manifest_of(_converted(model, _empty, names), dtype)


def changing_names(model: "PreTrainedModel") -> set[str] | None:
    """Return the tensors that updates change: None for all, or with adapters those of each module that holds adapted layers."""
    from transformers.core_model_loading import revert_weight_conversion

    if not (touched := adapters.touched_modules(model)):
        return None
    inside = {
        name: tensor
        for name, tensor in adapters.base_tensors(model)
        if name.rsplit(".", 2)[0] in touched and ".experts." not in name
    }
    return {
        own for name, tensor in inside.items() for own in revert_weight_conversion(model, {name: _empty(name, tensor)})
    }
