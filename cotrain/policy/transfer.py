"""Send the policy from the learner's memory to the engines, with vLLM's own weight transfer (NCCL or CUDA IPC).

An engine loads tensors as they arrive, so a transfer that fails leaves it with unknown weights. With "files" in
policy.weight_transfer, an engine checks weights first and can undo an update. Importing this module imports vLLM.
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
    """The policy's tensors as vLLM asks for them: by checkpoint name, with floating-point tensors in the serving dtype."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self._model, self._dtype = model, dtype

    def metadata(self) -> list[ParamMeta]:
        """Return the name, dtype and shape of each tensor."""
        return [ParamMeta(name, dtype, shape) for name, (shape, dtype) in layout(self._model, self._dtype).items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors. All ranks iterate together."""
        return whole_tensors(self._model, self._dtype)


class EngineClient:
    """Passes the calls of vLLM's sender on to all engines."""

    def __init__(self, engines: list[Any], workers: int):
        """engines: actors of engines that are paused. workers: tensor-parallel workers of each engine."""
        self._engines, self._workers = engines, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engines join the transfer. With NCCL, each worker gets a rank of its own after the sender's."""
        first = init_info.get("rank_offset")
        infos = [{} if first is None else {"rank_offset": first + i * self._workers} for i in range(len(self._engines))]
        calls = zip(self._engines, infos, strict=True)
        ray.get([e.call.remote("transfer", "init_weight_transfer_engine", init_info | own) for e, own in calls])

    def start_weight_update(self) -> None:
        """Prepare the engines to receive tensors."""
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the engines receive the tensors that update_info describes, while the sender sends them."""
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the engines serve what they received. weight_version is unused: RolloutEngine.update_policy sets the version."""
        self._all("finish_weight_update")

    def _all(self, method: str, *args: Any) -> None:
        ray.get([engine.call.remote("transfer", method, *args) for engine in self._engines])


def connect(
    backend: str, rank: int, source: PolicySource, engines: list[Any], workers: int, address: str, port: int
) -> Any:
    """Return vLLM's sender, whose send_weights sends the policy to all engines. Collective.

    workers: tensor-parallel workers of each engine. address, port: address of rank 0's node and a free port on it.
    """
    size = 1 + workers * len(engines)
    info: TrainerInitInfo = (
        IPCTrainerInitInfo(rank=rank, packed=True)
        if backend == "ipc"
        else NCCLTrainerInitInfo(rank=rank, master_address=address, master_port=port, world_size=size)
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=EngineClient(engines, workers), source=source)
