"""Policies that go from the learner's memory to the engines, without a file (policy.weight_transfer)."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import ray

from cotrain.actors.policy import Policy
from cotrain.config.schema import RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.process.calls import begin
from cotrain.process.cluster import Cluster, free_port
from cotrain.transport.nodes import Nodes

P = ParamSpec("P")


class PolicyTransfer:
    """Connects the learner to the engines, and lets it send."""

    def __init__(self, learner: Policy, cluster: Cluster, nodes: Nodes, config: RunConfig):
        self._learner, self._cluster, self._nodes = learner, cluster, nodes
        self._workers = config.rollout.tensor_parallel_size
        self._connected: list[Any] = []

    def send(self, engines: list[Any]) -> int:
        """Send the learner's weights to these actors, whose engines must be paused. Returns the number of bytes."""
        if engines != self._connected:
            node = self._learner.node
            address, port = self._cluster.node_address(node), self._nodes.call(node, free_port)
            client = EngineClient(engines, self._workers)
            self._learner.connect_engines(client, len(engines) * self._workers, address, port)
            self._connected = engines
        return self._learner.send_weights()


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
