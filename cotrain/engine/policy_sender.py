"""Send the policy from the learner's memory to the engines, with vLLM's own weight transfer (NCCL or CUDA IPC).

An engine loads tensors as they arrive, so a transfer that fails leaves it with unknown weights. With "files" in
policy.weight_transfer, an engine checks weights first and can undo an update. Importing this module imports vLLM.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from cotrain.weights.payload import Manifest


class PolicySource(WeightSource):
    """The policy's tensors as vLLM asks for them: by checkpoint name, with floating-point tensors in the serving dtype."""

    def __init__(self, layout: Manifest, tensors: Callable[[], Iterator[tuple[str, Tensor]]]):
        """layout: shape and dtype of each tensor. tensors: yields all of them; all ranks iterate together."""
        self._layout, self._tensors = layout, tensors

    def metadata(self) -> list[ParamMeta]:
        """Return the name, dtype and shape of each tensor."""
        return [ParamMeta(name, dtype, shape) for name, (shape, dtype) in self._layout.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors()


def connect(
    backend: str, rank: int, source: PolicySource, client: Any, num_workers: int, address: str, port: int
) -> Any:
    """Return vLLM's sender, whose send_weights sends the policy to all engines. Collective.

    client: the engines, as an EngineClient. num_workers: tensor-parallel workers of all engines. address, port: address of rank
    0's node and a free port on it.
    """
    info: TrainerInitInfo = (
        IPCTrainerInitInfo(rank=rank, packed=True)
        if backend == "ipc"
        else NCCLTrainerInitInfo(rank=rank, master_address=address, master_port=port, world_size=1 + num_workers)
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
