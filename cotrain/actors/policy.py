"""The policy learner in processes of its own, one a rank, and its client. See PolicyLearner for what the calls do."""

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from cotrain.actors.learner import Learner, LearnerActor, Pending
from cotrain.actors.policy_transfer import EngineClient
from cotrain.config.schema import RunConfig
from cotrain.lossless.emitted import Draws
from cotrain.policy.learner import PolicyLearner
from cotrain.process.cluster import Cluster, free_port
from cotrain.process.placement import roles_of
from cotrain.process.threads import openmp_environment
from cotrain.records import Rollout, ScoredRollout, WeightPayload
from cotrain.transport.nodes import Nodes
from drafters.base import SamplingParams

T = TypeVar("T")


class PolicyActor(LearnerActor):
    """A rank of the policy learner; the name is the process's title."""


class Policy(Learner[PolicyLearner]):
    """Client of the policy learner. Rollouts are put into the object store once for all ranks, to which Ray gives them."""

    _connected: list[Any] | None = None  # the engines to which `send_weights` has connected the learner

    def begin_update(self, rollouts: list[ScoredRollout]) -> Pending[dict[str, float]]:
        return self.begin(PolicyLearner.update, self._cluster.put(rollouts))

    def write_payload(self, path: Path) -> WeightPayload:
        return self.finish_payload(self.begin(PolicyLearner.write_payload, path))

    def finish_payload(self, pending: Pending[WeightPayload | None]) -> WeightPayload:
        return self._from_rank_0(self.finish(pending))

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
        return self._from_rank_0(self.call(PolicyLearner.hidden_states, token_ids, layers))

    def response_draws(self, rollouts: list[Rollout], sampling: SamplingParams, logit_tolerance: float) -> list[Draws]:
        draws = self.call(PolicyLearner.response_draws, self._cluster.put(rollouts), sampling, logit_tolerance)
        return self._from_rank_0(draws)

    @staticmethod
    def _from_rank_0(result: T | None) -> T:
        assert result is not None  # other ranks return None
        return result


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
            if config.policy.sharding and cluster.device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""  # FSDP shards over GPUs wherever it sees any
        actors.append(cluster.start(PolicyActor, role, environment))
    model_path, device = str(nodes.model_path), cluster.device
    create = partial(PolicyLearner, config.policy, config.rollout, model_path, config.steps, config.seed, device)
    return Policy(cluster, actors, first, create)
