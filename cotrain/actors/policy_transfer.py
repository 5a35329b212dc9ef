"""How the learner's process calls the engines while it sends them the policy without a file (policy.weight_transfer)."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import ray

from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.process.calls import begin

P = ParamSpec("P")


class EngineClient:
    """What vLLM's sender, in the learner's process, calls in the workers of all engines."""

    def __init__(self, engines: list[Any], workers: int):
        """engines: actors of engines that are paused. workers: tensor-parallel workers of each engine."""
        self._engines, self._workers = engines, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engines join the transfer. With NCCL, each worker gets a rank of its own after the sender's."""
        first = init_info.get("rank_offset")
        infos = [{} if first is None else {"rank_offset": first + i * self._workers} for i in range(len(self._engines))]
        join = EngineWorker.init_weight_transfer_engine
        calls = zip(self._engines, infos, strict=True)
        ray.get([begin(e, RolloutEngine.on_workers, join, init_info | own).reference for e, own in calls])

    def start_weight_update(self) -> None:
        """Prepare the engines to receive tensors."""
        self._all(EngineWorker.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the engines receive the tensors that update_info describes, while the sender sends them."""
        self._all(EngineWorker.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the engines serve what they received. weight_version is unused: RolloutEngine.update_policy sets the version."""
        self._all(EngineWorker.finish_weight_update)

    def _all(self, method: Callable[Concatenate[EngineWorker, P], None], *args: P.args, **options: P.kwargs) -> None:
        ray.get([begin(e, RolloutEngine.on_workers, method, *args, **options).reference for e in self._engines])
