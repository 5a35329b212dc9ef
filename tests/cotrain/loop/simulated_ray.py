"""Ray as the reactor sees it."""

from collections.abc import Callable
from typing import Any

from cotrain.process.failures import RunFailure, TaskFailed


class Reference:
    """A call under way. Its result, or the failure of its process, is there once it is set."""

    def __init__(self, what: Any):
        self.what, self.result, self.engine = what, None, 0


class Cluster:
    """Ray as the reactor sees it: something happens whenever somebody waits."""

    def __init__(self) -> None:
        self.happens: Callable[[list[Reference]], None] = lambda references: None

    def wait_any(self, references: list[Reference], timeout: float) -> list[Reference]:
        self.happens(references)
        return [reference for reference in references if reference.result is not None]

    def get(self, references: list[Reference]) -> list[Any]:
        for reference in references:
            if isinstance(reference.result, Exception) and not isinstance(
                reference.result, TaskFailed
            ):  # that is returned
                raise reference.result
        return [reference.result for reference in references]

    def hung(self, references: list[Reference], seconds: float) -> RunFailure:
        return RunFailure(f"{len(references)} do not answer")
