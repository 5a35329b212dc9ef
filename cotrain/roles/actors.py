"""The roles as they run inside Ray processes: plain objects whose methods are called by name.

What a role imports is imported in its own process, when it starts.
"""

import pkgutil
from typing import Any

from cotrain.process.engine_output import redirect_output
from cotrain.process.orphans import die_with_parent, leave_terminal_group
from cotrain.rollout.spec import EngineSpec


def _enter_process(log_file: str) -> None:
    """Give the actor's process its own log file and process group, and let it die with its parent."""
    redirect_output(log_file)
    leave_terminal_group()
    die_with_parent()


class EngineActor:
    """A rollout engine in its own process."""

    def __init__(self, log_file: str):
        _enter_process(log_file)

    def load_library(self) -> None:
        """Import vLLM, which takes seconds, while nobody waits for it."""
        import vllm.v1.engine.async_llm  # noqa: F401
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from cotrain.rollout.vllm.cpu import fork_engine_core

            fork_engine_core()

    async def start(self, spec: EngineSpec) -> dict[str, Any]:
        """See RolloutEngine.start."""
        from cotrain.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(spec)
        return await self._engine.start()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the engine; calls may overlap."""
        return await getattr(self._engine, method)(*args, **options)


class LearnerActor:
    """A learner in its own process."""

    def __init__(self, log_file: str):
        _enter_process(log_file)

    def start(self, learner_class: str, arguments: dict[str, Any]) -> None:
        """Make the learner; its class is named as module:class. Ray would bury an error of __init__ under its own."""
        self._learner = pkgutil.resolve_name(learner_class)(**arguments)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the learner."""
        return getattr(self._learner, method)(*args)


class PolicyActor(LearnerActor):
    """A rank of the policy learner; the name is the process's title."""


class DrafterActor(LearnerActor):
    """The drafter trainer; the name is the process's title."""
