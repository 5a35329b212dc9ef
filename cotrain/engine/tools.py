"""The tools of a trajectory, as its engine calls them: an environment in another process, which may hang, raise or die."""

import asyncio
import time
from typing import Any, NamedTuple

RETRY_S = 0.5  # between two questions whether a process that died has been started again


class ToolFailed(Exception):
    """An environment has raised, has not answered in time, or has lost its process."""


class ProcessDied(ToolFailed):
    """The process of an environment has ended."""


class Tools(NamedTuple):
    """The processes of the environments, and the limits of a trajectory; rollout.max_new_tokens is that of all its tokens."""

    environments: list[Any]  # actors, see EnvironmentActor
    max_turns: int
    max_turn_tokens: int
    step_timeout_s: float
    sampling: dict[str, Any] | None = None
    """In place of the run's, for held-out trajectories, which engines do not learn from."""

    def of(self, name: str, number: int) -> "TrajectoryTools":
        """Return what answers the trajectory of this name, in one of the processes. number: chooses the process."""
        return TrajectoryTools(self.environments[number % len(self.environments)], name, self.step_timeout_s)


class TrajectoryTools:
    """The environment of one trajectory. Every method raises ToolFailed."""

    def __init__(self, process: Any, name: str, timeout_s: float):
        self._process, self._name, self._timeout_s = process, name, timeout_s
        self.seconds = 0.0  # that the trajectory has waited for its tools

    async def begin(self, row: dict[str, Any]) -> None:
        """Make the environment of this row. A process that is being started again is waited for."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return await self._answer(self._process.begin.remote(self._name, row))
            except ProcessDied:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def step(self, text: str, last_token: int) -> list[int] | None:
        """Return the token ids of what the environment answers to a turn, or None if the trajectory has ended."""
        return await self._answer(self._process.step.remote(self._name, text, last_token))

    async def reward(self) -> float:
        """Return the reward of the trajectory, whose environment ends with it."""
        return await self._answer(self._process.reward.remote(self._name))

    def forget(self) -> None:
        """Let go of the environment, whatever has become of it."""
        self._process.forget.remote(self._name)

    async def _answer(self, reference: Any) -> Any:
        import ray

        started = time.monotonic()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), self._timeout_s)
        except TimeoutError:
            raise ToolFailed(f"no answer in {self._timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise ToolFailed(f"{type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise ProcessDied("its process has died") from error
        finally:
            self.seconds += time.monotonic() - started
