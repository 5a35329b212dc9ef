"""The policy learner in processes of its own, one a rank, and its client. See PolicyLearner for what the calls do."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

from torch import Tensor

from cotrain.actors.learner import Learner, LearnerActor
from cotrain.config.schema import RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.lossless.emitted import Draws
from cotrain.policy.learner import PolicyLearner
from cotrain.process.calls import P, Reply, T, begin
from cotrain.process.cluster import Cluster, engine_device, free_port, roles_of
from cotrain.process.threads import openmp_environment
from cotrain.records import Rollout, ScoredRollout, WeightPayload
from cotrain.transport.nodes import Nodes
from drafters.base import SamplingParams


class PolicyActor(LearnerActor):
    """A rank of the policy learner; the name is the process's title."""


class Policy(Learner[PolicyLearner]):
    """Client of the policy learner. Rollouts are put into the object store once for all ranks, to which Ray gives them."""

    _connected: list[Any] | None = None  # the engines to which `send_weights` has connected the learner

    def begin_update(self, rollouts: list[ScoredRollout]) -> list[Reply[dict[str, float]]]:
        return self.begin(PolicyLearner.update, self._cluster.put(rollouts))

    def of_rank_0(self, begun: list[Reply[T | None]]) -> T:
        """Wait for a call that returns None on all ranks but the first."""
        result = self.finish(begun)
        assert result is not None
        return result

    def write_payload(self, path: Path) -> WeightPayload:
        return self.of_rank_0(self.begin(PolicyLearner.write_payload, path))

    def send_weights(self, engines: list[Any], workers: int) -> int:
        """Send the weights to these actors, whose engines must be paused, without a file. Returns the number of bytes.

        workers: tensor-parallel workers of each engine.
        """
        if engines != self._connected:
            client, address = EngineClient(engines, workers), self._cluster.node_address(self.node)
            self.call(PolicyLearner.connect_engines, client, len(engines) * workers, address)
            self._connected = engines
        return self.call(PolicyLearner.send_weights)

    def hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return self.of_rank_0(self.begin(PolicyLearner.hidden_states, token_ids, layers))

    def response_draws(self, rollouts: list[Rollout], sampling: SamplingParams, logit_tolerance: float) -> list[Draws]:
        once = self._cluster.put(rollouts)
        return self.of_rank_0(self.begin(PolicyLearner.response_draws, once, sampling, logit_tolerance))


class EngineClient:
    """What vLLM's sender, in the learner's process, calls in the workers of all engines (policy.weight_transfer)."""

    def __init__(self, engines: list[Any], workers: int):
        """engines: actors of engines that are paused. workers: tensor-parallel workers of each engine."""
        self._engines, self._workers = engines, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engines join the transfer. With NCCL, each worker gets a rank of its own after the sender's."""
        first = init_info.get("rank_offset")
        infos = [{} if first is None else {"rank_offset": first + i * self._workers} for i in range(len(self._engines))]
        join = EngineWorker.init_weight_transfer_engine
        calls = zip(self._engines, infos, strict=True)
        _wait(begin(e, RolloutEngine.on_workers, join, init_info | own) for e, own in calls)

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
        _wait(begin(e, RolloutEngine.on_workers, method, *args, **options) for e in self._engines)


def _wait(calls: Iterable[Reply[None]]) -> None:
    import ray

    ray.get([call.reference for call in calls])


def start_policy(cluster: Cluster, nodes: Nodes, config: RunConfig) -> Policy:
    """Begin to start the ranks of a PolicyLearner."""
    roles = [role for role in roles_of(config) if role.startswith("policy")]
    node_of = [cluster.node_of[role] for role in roles]
    world, first, actors = len(roles), node_of[0], []
    shared = {"MASTER_ADDR": cluster.node_address(first), "MASTER_PORT": nodes.call(first, free_port)}
    for rank, (role, node) in enumerate(zip(roles, node_of, strict=True)):
        environment = nodes.call(node, openmp_environment)
        if world > 1 or config.policy.sharding:
            own = {"RANK": rank, "LOCAL_RANK": node_of[:rank].count(node)}
            own |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": node_of.count(node)}
            environment |= {name: str(value) for name, value in (shared | own).items()}
            if config.policy.sharding and engine_device() == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""  # FSDP shards over GPUs wherever it sees any
        actors.append(cluster.start(PolicyActor, role, environment))
    model_path, device = str(nodes.model_path), engine_device()
    create = partial(PolicyLearner, config.policy, config.rollout, model_path, config.steps, device, config.seed)
    return Policy(cluster, actors, first, create)
