"""The policy learner and the drafter trainer as the controller sees them: method calls by name, with Ray behind them."""

import pkgutil
import time
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process import threads
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster, free_port


class LearnerActor(Actor):
    """A learner in its own process."""

    def start(self, learner_class: str, arguments: dict[str, Any]) -> None:
        """Import and make the learner, named as module:class. Ray would bury an error of __init__ under its own."""
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
    """One actor for each rank. `begin` returns at once; all other methods wait, and raise what a rank raised.

    A rank makes its calls one after the other, so the first of them waits until the learner is made.
    """

    def __init__(self, cluster: Cluster, actors: list[Any], learner_class: str, **arguments: Any):
        """Begin to make the learner in every actor, see LearnerActor.start."""
        self.last_call = (0.0, 0.0)
        """When the last call that was waited for began and ended on rank 0 (time.time)."""
        self._cluster, self._actors = cluster, actors
        self._started = [actor.start.remote(learner_class, arguments) for actor in actors]

    def begin(self, method: str, *args: Any) -> list[Any]:
        """Begin a call on all ranks; `finish` waits for it."""
        return [actor.call.remote(method, *args) for actor in self._actors]

    def finish(self, begun: list[Any]) -> Any:
        """Wait for all ranks; the result of rank 0."""
        results = self._cluster.get([*self._started, *begun])[len(self._started) :]
        self._started = []
        result, *times = results[0]
        self.last_call = (times[0], times[1])
        return result

    def call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks; the result of rank 0."""
        return self.finish(self.begin(method, *args))


def start_policy(cluster: Cluster, config: RunConfig, model_path: Path) -> Learner:
    """Begin to start the ranks of a PolicyLearner."""
    world, port, actors = config.policy.num_processes, free_port(), []
    for rank in range(world):
        role, environment = "policy", threads.openmp_environment(threads.num_cores())
        if world > 1:
            role = f"policy_{rank}"
        if world > 1 or config.policy.sharding:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            environment |= {name: str(value) for name, value in (places | {"MASTER_PORT": port}).items()}
            environment |= {"MASTER_ADDR": "127.0.0.1"}
            if config.policy.sharding and cluster.device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""  # FSDP shards over GPUs wherever it sees any
        actors.append(cluster.start(PolicyActor, role, environment))
    return Learner(
        cluster,
        actors,
        "cotrain.policy.learner:PolicyLearner",
        config=config.policy,
        rollout=config.rollout,
        model_path=str(model_path),
        total_steps=config.steps,
        seed=config.seed,
        device=cluster.device,
    )


def start_drafter(cluster: Cluster, config: RunConfig, model_path: Path, init_folder: Path | None) -> Learner:
    """Begin to start a DrafterTrainer."""
    actor = cluster.start(DrafterActor, "drafter", threads.openmp_environment(threads.num_cores()))
    name, device = "cotrain.trainer.trainer:DrafterTrainer", cluster.device
    return Learner(cluster, [actor], name, config=config, model_path=model_path, init_folder=init_folder, device=device)
