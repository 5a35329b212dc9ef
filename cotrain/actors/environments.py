"""Environments in processes of their own: a tool that hangs, raises or ends its process takes one trajectory or those of its process
with it, and neither engine nor run."""

from collections.abc import Sequence
from typing import Any

from cotrain.config.schema import EnvironmentTask, RunConfig
from cotrain.engine.tools import Tools
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster, roles_of
from cotrain.process.threads import openmp_environment
from cotrain.transport.nodes import Nodes

MOST_STEPS = 1000  # tools of one process that may work at the same time, each in a thread


class EnvironmentActor(Actor):
    """Environments by the name of their trajectory. Ray starts the process again if it ends, without its environments."""

    def __init__(self, log_file: str, config: EnvironmentTask, model: str):
        super().__init__(log_file)
        from pathlib import Path

        from cotrain.tasks.environments import TurnTemplate, load_factory
        from cotrain.tasks.prompts import load_tokenizer

        self._factory, self._template = load_factory(config), TurnTemplate(load_tokenizer(Path(model)))
        self._environments: dict[str, Any] = {}

    def begin(self, name: str, row: dict[str, Any]) -> None:
        """Make the environment of a trajectory."""
        environment = self._factory(**row)
        environment.messages()
        self._environments[name] = environment

    def step(self, name: str, text: str, last_token: int) -> list[int] | None:
        """Return the token ids of what the environment answers to a turn, or None if the trajectory has ended."""
        answer = self._environments[name].step(text)
        return None if answer is None else self._template.observation(str(answer), last_token)

    def reward(self, name: str) -> float:
        """Return the reward of a trajectory, and forget its environment."""
        reward = float(self._environments[name].reward())
        self.forget(name)
        return reward

    def forget(self, name: str) -> None:
        """Forget the environment of a trajectory, and close it if it can be."""
        environment = self._environments.pop(name, None)
        if hasattr(environment, "close"):
            environment.close()


def start_environments(
    cluster: Cluster,
    nodes: Nodes,
    config: RunConfig,
    prefix: str = "environments",
    sampling: dict[str, Any] | None = None,
) -> Tools | None:
    """Begin to start the processes of the environments, in the roles of this prefix; None for a task without. sampling: see Tools."""
    if not isinstance(config.task, EnvironmentTask):
        return None
    task, actors = config.task, list[Any]()
    for role in (role for role in roles_of(config) if role.startswith(prefix)):
        environment = nodes.call(cluster.node_of[role], openmp_environment, 1)
        options = {"max_concurrency": MOST_STEPS, "max_restarts": -1}
        arguments: Sequence[Any] = (task, str(nodes.model_path))
        actors.append(cluster.start(EnvironmentActor, role, environment, *arguments, **options))
    turn_tokens = task.max_turn_tokens or config.rollout.max_new_tokens
    return Tools(actors, task.max_turns, turn_tokens, task.step_timeout_s, sampling)
