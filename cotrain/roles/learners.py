"""The policy learner and the drafter trainer as the controller sees them: method calls by name, with Ray behind them."""

import pkgutil
import time
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster, free_port
from cotrain.process.placement import roles_of
from cotrain.process.threads import openmp_environment
from cotrain.trainer.spec import trainer_spec
from cotrain.transport.nodes import Nodes


class LearnerActor(Actor):
    """A learner in its own process."""

    def start(self, learner_class: str, arguments: dict[str, Any]) -> None:
        """Import and create the learner, named as module:class. In __init__, Ray would bury an error under its own."""
        self._learner = pkgutil.resolve_name(learner_class)(**arguments)

    def call(self, method: str, *args: Any) -> tuple[Any, float, float]:
        """Call a method of the learner. Returns its result, and when it began and ended (time.time)."""
        began = time.time()
        return getattr(self._learner, method)(*args), began, time.time()


class PolicyActor(LearnerActor):
    """A rank of the policy learner; the name is the process's title."""


class DrafterActor(LearnerActor):
    """The drafter trainer; the name is the process's title."""


class Learner:
    """A learner with one actor per rank. `begin` returns at once; all other methods wait, and raise what a rank raised.

    Each rank runs its calls in order, so the first call waits until the learner has been created.
    """

    def __init__(self, cluster: Cluster, actors: list[Any], node: str, learner_class: str, **arguments: Any):
        """Begin to create the learner in every actor; the arguments are those of LearnerActor.start."""
        self.node = node
        """The node that rank 0 is on."""
        self.last_call = (0.0, 0.0)
        """When the last call that `finish` waited for began and ended on rank 0 (time.time)."""
        self._cluster, self._actors = cluster, actors
        self._started = [actor.start.remote(learner_class, arguments) for actor in actors]

    def begin(self, method: str, *args: Any) -> list[Any]:
        """Begin a call on all ranks; `finish` waits for it."""
        return [actor.call.remote(method, *args) for actor in self._actors]

    def finish(self, begun: list[Any]) -> Any:
        """Wait for all ranks and return the result of rank 0."""
        results = self._cluster.get([*self._started, *begun])[len(self._started) :]
        self._started = []
        result, *times = results[0]
        self.last_call = (times[0], times[1])
        return result

    def call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks and return the result of rank 0."""
        return self.finish(self.begin(method, *args))


def start_policy(cluster: Cluster, nodes: Nodes, config: RunConfig) -> Learner:
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
    return Learner(
        cluster,
        actors,
        first,
        "cotrain.policy.learner:PolicyLearner",
        config=config.policy,
        rollout=config.rollout,
        model_path=str(nodes.model_path),
        total_steps=config.steps,
        seed=config.seed,
        device=cluster.device,
    )


def start_drafter(cluster: Cluster, nodes: Nodes, config: RunConfig, init_folder: Path | None) -> Learner:
    """Begin to start a DrafterTrainer."""
    node = cluster.node_of["drafter"]
    actor = cluster.start(DrafterActor, "drafter", nodes.call(node, openmp_environment))
    return Learner(
        cluster,
        [actor],
        node,
        "cotrain.trainer.trainer:DrafterTrainer",
        spec=trainer_spec(config),
        model_path=nodes.model_path,
        init_folder=init_folder,
        device=cluster.device,
    )
