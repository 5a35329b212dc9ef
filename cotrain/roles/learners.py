"""The policy learner and the drafter trainer as the controller sees them: method calls by name, with Ray behind them."""

from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process import threads
from cotrain.process.cluster import Cluster, Placement, free_port
from cotrain.roles.actors import DrafterActor, PolicyActor

ACTORS = {"policy": PolicyActor, "drafter": DrafterActor}
"""Actor of each kind of learner, by the name of its log file."""


class Learner:
    """One actor for each rank. `begin` returns at once; all other methods wait, and raise what a rank raised."""

    def __init__(self, cluster: Cluster, name: str, num_ranks: int, gpus: float, start: tuple[str, dict[str, Any]]):
        """Begin to start the ranks; `wait_until_started` waits for them. start: the arguments of LearnerActor.start."""
        self._cluster, port = cluster, free_port()
        environment = threads.openmp_environment(threads.num_cores())
        self._actors = [
            cluster.start(
                ACTORS[name],
                cluster.log_file(name if num_ranks == 1 else f"{name}_{rank}"),
                environment=environment | _rank(rank, num_ranks, port),
                gpus=gpus,
            )
            for rank in range(num_ranks)
        ]
        self._started = [actor.start.remote(*start) for actor in self._actors]

    def wait_until_started(self) -> None:
        self._cluster.get(self._started)

    def begin(self, method: str, *args: Any) -> Any:
        """Begin a call on all ranks; `finish` waits for it."""
        return [actor.call.remote(method, *args) for actor in self._actors]

    def finish(self, begun: Any) -> Any:
        """Wait for all ranks; the result of rank 0."""
        return self._cluster.get(begun)[0]

    def call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks; the result of rank 0."""
        return self.finish(self.begin(method, *args))

    def call_first(self, method: str, *args: Any) -> Any:
        """Call a method on rank 0 alone."""
        return self._cluster.get(self._actors[0].call.remote(method, *args))


def start_policy(cluster: Cluster, config: RunConfig, model_path: Path, placement: Placement) -> Learner:
    """Begin to start the ranks of a PolicyLearner."""
    arguments = {
        "config": config.policy,
        "rollout": config.rollout,
        "model_path": str(model_path),
        "total_steps": config.steps,
        "seed": config.seed,
        "device": placement.device,
    }
    start = ("cotrain.policy.learner:PolicyLearner", arguments)
    return Learner(cluster, "policy", config.policy.num_processes, placement.gpus, start)


def start_drafter(
    cluster: Cluster, config: RunConfig, model_path: Path, init_folder: Path | None, placement: Placement
) -> Learner:
    """Start a DrafterTrainer, and wait for it."""
    arguments = {"config": config, "model_path": model_path, "init_folder": init_folder, "device": placement.device}
    start = ("cotrain.trainer.trainer:DrafterTrainer", arguments)
    drafter = Learner(cluster, "drafter", 1, placement.gpus, start)
    drafter.wait_until_started()
    return drafter


def _rank(rank: int, world: int, port: int) -> dict[str, str]:
    if world == 1:
        return {}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in ranks.items()}
