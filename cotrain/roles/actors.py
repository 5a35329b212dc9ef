"""The roles as they run inside Ray processes: the plain classes, plus a log file and weights written for the engines.

Each actor writes all output of its process, and of the processes it starts, to its own log file.
"""

import os
from typing import Any

from cotrain.process.orphans import die_with_parent, leave_terminal_group
from cotrain.records import WeightPayload
from cotrain.rollout.engine import RolloutEngine
from cotrain.rollout.spec import EngineSpec


def enter_process(log_file: str) -> None:
    """First thing in every actor: own log file, own process group, no life after the parent."""
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    leave_terminal_group()
    die_with_parent()


class EngineActor(RolloutEngine):
    """A rollout engine in its own process."""

    def __init__(self, spec: EngineSpec, log_file: str):
        enter_process(log_file)
        super().__init__(spec)


class PolicyActor:
    """One rank of the policy learner."""

    def __init__(self, log_file: str, arguments: dict[str, Any]):
        enter_process(log_file)
        self._arguments = arguments

    def start(self) -> None:
        """Load the policy and join the other ranks. Not in __init__: Ray would bury an error under its own."""
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
