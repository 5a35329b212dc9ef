"""Waits in one thread for everything that runs at the same time: groups, rewards, the learner, the drafter trainer.

It waits for Ray object references. Each has a handler, which is called with the result as soon as that is available. Results
are handled one by one, in the order in which they arrive, and each at the same cost however many are waited for.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cotrain.process.calls import Reply
from cotrain.process.cluster import Arrival, Cluster
from cotrain.process.failures import RunFailure

T = TypeVar("T")
TICK_SECONDS = 0.5  # how often time limits are checked, and how long a wait may take


class Reactor:
    """The Ray references that are waited for, and the handlers of their results."""

    def __init__(self, cluster: Cluster, stalled_after_s: float):
        """stalled_after_s: seconds without any result after which the run counts as stalled."""
        self._cluster, self._stalled_after_s = cluster, stalled_after_s
        self._handlers: dict[Any, tuple[Callable[[Any], None], Callable[[RunFailure], None] | None]] = {}
        self._tick: Callable[[], None] = lambda: None
        self._describe: Callable[[], str] = lambda: "nothing is known"

    def watch(self, tick: Callable[[], None], describe: Callable[[], str]) -> None:
        """Call `tick` every TICK_SECONDS or so while something is waited for. describe: says what is running when the run stalls."""
        self._tick, self._describe = tick, describe

    def add(
        self, reference: Any, handler: Callable[[Any], None], failed: Callable[[RunFailure], None] | None = None
    ) -> None:
        """Call `handler` with the result once it is there, or `failed`, if given, when the process has died."""
        self._handlers[reference] = handler, failed
        self._cluster.watch(reference)

    def drop(self, reference: Any) -> None:
        """Stop waiting for a reference; its result is not handled."""
        self._handlers.pop(reference, None)

    def is_there(self, reference: Any) -> bool:
        """Whether the result of a reference is available."""
        return self._cluster.is_there(reference)

    def until(self, done: Callable[[], T | None]) -> T:
        """Handle results until `done` returns something true, and return that.

        Raises what a call raised. Raises RunFailure when a process has died whose call has no `failed` handler, when
        there is nothing left to wait for, or when no result has arrived for too long.
        """
        last = ticked = time.monotonic()
        while not (returned := done()):
            if not self._handlers:
                raise RunFailure(f"deadlock: no task is pending ({self._describe()}): please report this")
            arrival = self._cluster.next_arrival(TICK_SECONDS)
            if arrival is not None and arrival.reference in self._handlers:  # another handler may have dropped it
                self._handle(arrival)
            now = time.monotonic()
            if arrival is None or now - ticked > TICK_SECONDS:
                self._tick()
                ticked = now
            last = now if arrival is not None else last
            if now - last > self._stalled_after_s:
                hung = self._cluster.hung(list(self._handlers), self._stalled_after_s)
                raise RunFailure(f"{hung}; {self._describe()}")
        return returned

    def wait(self, calls: Sequence[Reply[Any]]) -> None:
        """Handle results until these calls have theirs, which are ignored."""
        references = [call.reference for call in calls]
        for reference in references:
            self.add(reference, lambda result: None)
        self.until(lambda: self._handlers.keys().isdisjoint(references))

    def _handle(self, arrival: Arrival) -> None:
        handler, failed = self._handlers.pop(arrival.reference)
        try:
            result = self._cluster.result(arrival)
        except RunFailure as failure:
            if failed is None:
                raise
            failed(failure)
        else:
            handler(result)
