"""Rewards in a process of their own, beside generation: a scorer that hangs or dies does not take the run with it."""

from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster
from cotrain.process.threads import openmp_environment
from cotrain.transport.nodes import Nodes


class RewardActor(Actor):
    """Scores responses, one call after the other, in the main thread, which math-verify needs."""

    def start(self, config: RunConfig) -> None:
        """Build the task. Every process that builds it from the same config gets the same prompts."""
        from cotrain.tasks.base import build_task

        self._task = build_task(config.task, config.seed)

    def score(self, index: int, responses: list[str]) -> list[float]:
        """Return the reward of each response to the prompt at this index."""
        prompt = self._task.prompt(index)
        return [self._task.score(prompt, response) for response in responses]


class Rewards:
    """The scoring process as the stream sees it."""

    def __init__(self, cluster: Cluster, nodes: Nodes, config: RunConfig):
        self._cluster, self._config = cluster, config
        self._environment = nodes.call(cluster.node_of["rewards"], openmp_environment, 1)
        self._actor: Any = None
        self._first = [self.restart()]

    def restart(self) -> Any:
        """Begin to start the process, and kill the previous one. Returns the start's reference; calls wait for the start."""
        if self._actor is not None:
            self._cluster.kill(self._actor)
        self._actor = self._cluster.start(RewardActor, "rewards", self._environment)
        return self._actor.start.remote(self._config)

    def begin(self, index: int, responses: list[str]) -> Any:
        """Begin to score responses to the prompt at this index. Returns the reference of their rewards.

        The first call waits for the task to be built and raises what that has raised.
        """
        self._cluster.get(self._first)
        self._first = []
        return self._actor.score.remote(index, responses)
