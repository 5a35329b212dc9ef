"""A policy in parts: FSDP2 through Accelerate, its weights written one parameter at a time, and its checkpoints.

All of it works on a policy that is whole on each rank, too. All ranks must call a function that is called collective;
under FSDP, those that do wait for the others.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from cotrain.records import WeightPayload
from cotrain.transport.payload import Manifest, write_tensors

OPTIMIZER_STATE = "optimizer"
"""Folder of a checkpoint with the optimizer's state, in torch.distributed.checkpoint's format."""

# torch.distributed.checkpoint wonders whether a single process is meant to be one.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def sharding_accelerator(cpu: bool) -> Accelerator:
    """Return an Accelerator that prepares a model by FSDP2, a layer at a time.

    Raises ValueError when the process has not joined a group, which a single rank needs too.
    """
    processes = PartialState(cpu=cpu)
    if not distributed.is_initialized():
        raise ValueError(
            "policy.sharding shards over a process group, also with one process; set RANK, LOCAL_RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=cpu, mixed_precision="no", fsdp_plugin=plugin)
    if cpu:
        # Accelerate 1.15 takes the plugin on GPUs alone, and would train by DDP without a word. Its FSDP2 code works with
        # gloo as it is. This can go when AcceleratorState.__init__ knows MULTI_CPU beside MULTI_GPU.
        processes.distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def whole_tensors(
    model: PreTrainedModel, dtype: torch.dtype, names: set[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors in the names of its checkpoint, without tied duplicates, floating ones in `dtype`.

    names: yield only these. Collective: each parameter is cast, gathered from all ranks, and let go before the next one.
    """

    def whole(tensor: Tensor) -> Tensor:
        cast = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype)
        return cast.full_tensor() if isinstance(cast, DTensor) else cast

    return _converted(model, whole, names)


def write_weights(
    model: PreTrainedModel, path: Path, dtype: torch.dtype, names: set[str] | None = None
) -> WeightPayload | None:
    """Write what whole_tensors yields to a safetensors file on rank 0, and describe it there; None on other ranks.

    Collective. Raises OSError when the disk is full.
    """
    tensors = whole_tensors(model, dtype, names)
    try:
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            return write_tensors(layout(model, dtype, names), tensors, path)
        return None
    finally:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            for _ in tensors:  # on the other ranks all of them; on rank 0 those that a full disk has left
                pass


def save_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path) -> None:
    """Write the optimizer's state by parameter names, each rank its part; nothing before the first step. Collective."""
    if optimizer.state:
        checkpoint.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / OPTIMIZER_STATE)


def load_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path) -> None:
    """Continue with a state that any number of ranks saved, sharded or not. Collective."""
    optimizer.state.clear()
    if (folder / OPTIMIZER_STATE).is_dir():
        state = get_optimizer_state_dict(model, optimizer)
        checkpoint.load(state, checkpoint_id=folder / OPTIMIZER_STATE)
        set_optimizer_state_dict(model, optimizer, state)


def _state(model: PreTrainedModel) -> dict[str, Tensor]:
    tied = set(model.all_tied_weights_keys)
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _converted(
    model: PreTrainedModel, whole: Callable[[Tensor], Tensor], names: set[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in _state(model).items():
        if names is None or names & revert_weight_conversion(model, {name: _empty(tensor)}).keys():
            yield from revert_weight_conversion(model, {name: whole(tensor)}).items()


def layout(model: PreTrainedModel, dtype: torch.dtype, names: set[str] | None = None) -> Manifest:
    """Return shape and dtype of each tensor that whole_tensors yields; nothing is gathered."""
    shapes = _converted(model, _empty, names)
    return {
        name: (tuple(tensor.shape), dtype if tensor.is_floating_point() else tensor.dtype) for name, tensor in shapes
    }
