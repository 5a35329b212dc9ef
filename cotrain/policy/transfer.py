"""The policy out of the learner's memory into that of the engines, by vLLM's own weight transfer (NCCL or CUDA IPC).

Tensors are loaded as they come, so a transfer that fails leaves an engine with weights that nobody knows. `files` in
policy.weight_transfer is the way that checks first and can go back. Importing this module imports vLLM.
"""

from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from cotrain.policy.sharding import layout, whole_tensors


class PolicySource(WeightSource):
    """The policy's tensors as vLLM asks for them: in the names of the checkpoint, floating ones in the serving dtype."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self._model, self._dtype = model, dtype

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each tensor."""
        return [ParamMeta(name, dtype, shape) for name, (shape, dtype) in layout(self._model, self._dtype).items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors. All ranks iterate together."""
        return whole_tensors(self._model, self._dtype)


class EngineClient:
    """How vLLM's sender speaks to the engines."""

    def __init__(self, engines: list[Any], workers: int):
        """engines: their actors, which stand still. workers: tensor-parallel workers of each."""
        self._engines, self._workers = engines, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engines join. Each worker has a rank of its own behind the sender's."""
        first = init_info.get("rank_offset")
        infos = [{} if first is None else {"rank_offset": first + i * self._workers} for i in range(len(self._engines))]
        calls = zip(self._engines, infos, strict=True)
        ray.get([e.call.remote("transfer", "init_weight_transfer_engine", init_info | own) for e, own in calls])

    def start_weight_update(self) -> None:
        """Let the engines get ready for tensors."""
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the engines take the tensors that this describes, while the sender sends them."""
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the engines serve what they have taken. The controller stamps the version itself."""
        self._all("finish_weight_update")

    def _all(self, method: str, *args: Any) -> None:
        ray.get([engine.call.remote("transfer", method, *args) for engine in self._engines])


def connect(
    backend: str, rank: int, source: PolicySource, engines: list[Any], workers: int, address: str, port: int
) -> Any:
    """Return vLLM's sender, whose send_weights sends the policy to all engines. Collective.

    workers: tensor-parallel workers of each engine. address, port: of rank 0's node, where nothing listens yet.
    """
    size = 1 + workers * len(engines)
    info: TrainerInitInfo = (
        IPCTrainerInitInfo(rank=rank, packed=True)
        if backend == "ipc"
        else NCCLTrainerInitInfo(rank=rank, master_address=address, master_port=port, world_size=size)
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=EngineClient(engines, workers), source=source)
