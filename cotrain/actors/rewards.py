"""Rewards in processes of their own, beside generation: a scorer that hangs or dies does not take the run with it."""

import traceback
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster, roles_of
from cotrain.process.failures import TaskFailed
from cotrain.process.threads import openmp_environment
from cotrain.records import Prompt
from cotrain.transport.nodes import Nodes


class RewardActor(Actor):
    """Scores responses, one call after the other, in the main thread, which math-verify needs."""

    def start(self, config: RunConfig) -> None:
        """Load the reward. Prompts come with the responses, so that the data is not read here too."""
        from cotrain.tasks.base import build_score

        self._score = build_score(config.task, config.seed)

    def score(self, prompt: Prompt, responses: list[str]) -> list[float] | TaskFailed:
        """Return the reward of each response to a prompt, or the failure if a reward has raised, which goes into the log too."""
        from cotrain.tasks.rewards import reward_failure

        try:
            return self._score(prompt, responses)
        except (Exception, SystemExit) as error:  # a verifier of reasoning-gym may end its process
            traceback.print_exception(error)
            print(f"prompt {prompt}\nresponses {responses}", flush=True)
            return error if isinstance(error, TaskFailed) else reward_failure(error, prompt, responses)


class Rewards:
    """A scoring process as the stream sees it."""

    def __init__(self, cluster: Cluster, nodes: Nodes, config: RunConfig, role: str):
        self._cluster, self._config, self._role = cluster, config, role
        self._environment = nodes.call(cluster.node_of[role], openmp_environment, 1)
        self._actor: Any = None
        self.starting = self.restart()  # reference of the process's first start

    def restart(self) -> Any:
        """Kill the process and begin to start another one. Returns the reference of its start, which raises what that raises."""
        if self._actor is not None:
            self._cluster.kill(self._actor)
        self._actor = self._cluster.start(RewardActor, self._role, self._environment)
        return self._actor.start.remote(self._config)

    def begin(self, prompt: Prompt, responses: list[str]) -> Any:
        """Begin to score responses to a prompt, once the process has started. Returns the reference of their rewards."""
        return self._actor.score.remote(prompt, responses)


def start_scorers(cluster: Cluster, nodes: Nodes, config: RunConfig) -> list[Rewards]:
    """Begin to start task.num_scorers scoring processes."""
    return [Rewards(cluster, nodes, config, role) for role in roles_of(config) if role.startswith("rewards")]
