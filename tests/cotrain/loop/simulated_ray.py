"""Ray as the reactor sees it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cotrain.process.cluster import Arrival
from cotrain.process.failures import RunFailure, TaskFailed


class Reference:
    """A call under way. Its result, or the failure of its process, is there once it is set."""

    def __init__(self, what: Any):
        self.what, self.result, self.engine = what, None, 0


class Cluster:
    """Ray as the reactor sees it: something happens whenever somebody waits and nothing has ended."""

    def __init__(self) -> None:
        self.happens: Callable[[list[Reference]], None] = lambda references: None
        self.watched: list[Reference] = []

    def watch(self, reference: Reference) -> None:
        self.watched.append(reference)

    def is_there(self, reference: Reference) -> bool:
        self.happens([reference])
        return reference.result is not None

    def next_arrival(self, seconds: float) -> Arrival | None:
        if (ended := self._first_ended()) is None:
            self.happens(self.watched)
            ended = self._first_ended()
        if ended is None:
            return None
        self.watched.remove(ended)
        return Arrival(ended, Future())

    def _first_ended(self) -> Reference | None:
        return next((reference for reference in self.watched if reference.result is not None), None)

    def result(self, arrival: Arrival) -> Any:
        result = arrival.reference.result
        if isinstance(result, Exception) and not isinstance(result, TaskFailed):  # that is returned
            raise result
        return result

    def hung(self, references: list[Reference], seconds: float) -> RunFailure:
        return RunFailure(f"{len(references)} do not answer")
