"""vLLM's NCCL weight transfer with gloo in NCCL's place, so that weights pass from memory to memory without a GPU."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from cotrain.engine.worker_extension import CotrainWorker


class Group:
    def __init__(self, info: Any, rank: int):
        self.group = stateless_init_torch_distributed_process_group(
            info.master_address, info.master_port, rank, info.world_size, "gloo"
        )

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """Nothing is left when the processes end."""


@dataclass
class GlooInitInfo(nccl_engine.NCCLTrainerInitInfo):
    backend: ClassVar[str] = "gloo"
    packed: bool = False


class GlooReceiver(nccl_engine.NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info: Any) -> None:
        self.model_update_group = Group(init_info, init_info.rank_offset + self.parallel_config.rank)  # type: ignore[assignment]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for name, dtype, shape in zip(*(update_info[key] for key in ("names", "dtype_names", "shapes")), strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast(weight)  # type: ignore[union-attr, call-arg]
            self.model.load_weights([(name, weight)])


class GlooSender(nccl_engine.NCCLTrainerWeightTransferEngine):
    def _broadcast(self, source: Any, meta: Any) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous())  # type: ignore[union-attr, call-arg]


def register() -> None:
    """In a process of its own: vLLM's registry takes a name once."""
    WeightTransferEngineFactory.register_engine("gloo", GlooReceiver)
    WeightTransferTrainerFactory.register_engine("gloo", GlooSender)
    nccl_engine.open_trainer_endpoint = lambda info: Group(info, 0)  # type: ignore[assignment]


class GlooWorker(CotrainWorker):
    """vLLM imports it in each worker, before the worker makes its end of the transfer."""


if "gloo" not in WeightTransferEngineFactory._registry:
    register()
