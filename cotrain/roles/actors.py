"""The roles as they run inside Ray processes: the plain classes, plus a log file and weights written for the engines.

What a role imports is imported in its own process, when it starts.
"""

from typing import Any

from cotrain.process.engine_output import redirect_output
from cotrain.process.orphans import die_with_parent, leave_terminal_group
from cotrain.records import WeightPayload
from cotrain.rollout.spec import EngineSpec


def enter_process(log_file: str) -> None:
    """Give the actor's process its own log file and process group, and let it die with its parent."""
    redirect_output(log_file)
    leave_terminal_group()
    die_with_parent()


class EngineActor:
    """A rollout engine in its own process."""

    def __init__(self, log_file: str):
        enter_process(log_file)

    def load_library(self) -> None:
        """Import vLLM, which takes seconds, while nobody waits for it."""
        import vllm.v1.engine.async_llm  # noqa: F401

    async def start(self, spec: EngineSpec) -> dict[str, Any]:
        """See RolloutEngine.start."""
        from cotrain.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(spec)
        return await self._engine.start()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the engine; calls may overlap."""
        return await getattr(self._engine, method)(*args, **options)


class PolicyActor:
    """One rank of the policy learner."""

    def __init__(self, log_file: str, arguments: dict[str, Any]):
        enter_process(log_file)
        self._arguments = arguments

    def start(self) -> None:
        """Load the policy and join the other ranks. Ray would bury an error of __init__ under its own."""
        from cotrain.policy.learner import PolicyLearner

        self._learner = PolicyLearner(**self._arguments)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the learner."""
        return getattr(self._learner, method)(*args)

    def write_payload(self, path: str, dtype: str) -> WeightPayload:
        """Write the weights for the engines."""
        import torch

        from cotrain.transport.payload import write_payload

        return write_payload(self._learner.state_for_serving(), path, getattr(torch, dtype))
