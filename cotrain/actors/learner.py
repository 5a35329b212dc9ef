"""What the clients of the policy learner and of the drafter trainer share: one actor a rank, and calls that mypy checks."""

import time
from collections.abc import Callable
from typing import Any, Concatenate, Generic, TypeVar

from cotrain.process.calls import P, Reply, T, begin
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster

L = TypeVar("L")


class LearnerActor(Actor):
    """A learner in its own process."""

    def start(self, create: Callable[[], Any]) -> None:
        """Create the learner. In __init__, Ray would bury an error under its own."""
        self._learner = create()

    def call(self, method: str, *args: Any, **options: Any) -> tuple[Any, float, float]:
        """Call a method of the learner. Returns its result, and when it began and ended (time.time)."""
        began = time.time()
        return getattr(self._learner, method)(*args, **options), began, time.time()


class Learner(Generic[L]):
    """Base of a client of a learner L, whose methods it calls; each rank runs its calls in order."""

    def __init__(self, cluster: Cluster, actors: list[Any], node: str, create: Callable[[], L]):
        """Begin to create the learner in every actor. The first call waits until it has been created."""
        self.node = node  # the node that rank 0 is on
        self.last_call = [0.0, 0.0]  # when the last call that `finish` waited for began and ended on rank 0 (time.time)
        self._cluster, self._actors = cluster, actors
        self._started = [actor.start.remote(create) for actor in actors]

    def finish(self, begun: list[Reply[T]]) -> T:
        """Wait for a call on all ranks and return the result of rank 0."""
        results = self._cluster.get([*self._started, *(reply.reference for reply in begun)])
        result, *self.last_call = results[len(self._started)]
        self._started = []
        return result

    def begin(self, method: Callable[Concatenate[L, P], T], *args: P.args, **options: P.kwargs) -> list[Reply[T]]:
        """Begin a call on all ranks; `finish` waits for it."""
        return [begin(actor, method, *args, **options) for actor in self._actors]

    def call(self, method: Callable[Concatenate[L, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return the result of a call. Raises what a rank raised."""
        return self.finish(self.begin(method, *args, **options))
