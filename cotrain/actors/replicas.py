"""The processes of the rollout engines: how they start, what happens when one dies, and how several are called."""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate

from cotrain.config.lossless_guard import MODEL_RUNNER
from cotrain.config.schema import RunConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.processes import import_vllm
from cotrain.engine.trajectories import TrajectoryEngine
from cotrain.process.calls import P, Reply, T, begin
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster, temporary_files
from cotrain.process.failures import RunFailure
from cotrain.process.threads import engine_environment
from cotrain.records import derived_seed
from cotrain.transport.nodes import Nodes
from cotrain.weights.payload import WeightUpdateRefused
from cotrain.weights.versions import CurrentWeights
from drafters.base import ServingSpec

MOST_CALLS = 100_000
"""Maximum number of concurrent calls of an engine. A further call would wait for another to end, and a weight update could wait
as long as a rollout takes; the stream gives an engine far fewer groups, each of which is a call. Ray's concurrency groups do not help, because each has
its own event loop and vLLM's asynchronous engine lives in a single one."""

MOST_RESTARTS = 3
"""Restarts of an engine. One that dies more often stays in quarantine, because its deaths are no accident."""

Method = Callable[Concatenate[TrajectoryEngine, P], Coroutine[Any, Any, T]]
Watch = Callable[[Any, Callable[[Any], None], Callable[[RunFailure], None]], None]


class EngineActor(Actor):
    """A rollout engine in its own process. vLLM is imported only there."""

    def load_library(self) -> None:
        """Import vLLM while nobody waits for it, because the import takes seconds."""
        import_vllm()

    async def start(self, spec: EngineSpec) -> None:
        """See RolloutEngine.start."""
        self._engine = TrajectoryEngine(spec)
        await self._engine.start()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the engine, for `begin`; calls may overlap."""
        return await getattr(self._engine, method)(*args, **options)


class Replicas(ABC):
    """The processes of the vLLM replicas. One that dies is quarantined: it gets no calls until it has been started again and
    `come_back` has ended its quarantine."""

    def __init__(self, cluster: Cluster, nodes: Nodes, config: RunConfig, current: CurrentWeights, watch: Watch):
        """Start the processes, which import vLLM in the background; `start` loads the models.

        current: what the engines serve. watch: Reactor.add, which waits for engines that are started again.
        """
        self._cluster, self._nodes, self._config, self._current, self._watch = cluster, nodes, config, current, watch
        self.node_of = [cluster.node_of[_role(i)] for i in range(config.rollout.num_engines)]
        self._actors = [self._new_actor(i) for i in range(len(self.node_of))]
        self._specs: list[EngineSpec] = []
        self._away: set[int] = set()
        self._deaths: Counter[int] = Counter()

    @abstractmethod
    def come_back(self, engine: int) -> None:
        """Bring an engine that has been started again to what the others serve, and end its quarantine."""

    def start(self, serving: ServingSpec | None, first_step: int, drafter_folder: Path) -> list[Any]:
        """Begin to load the models. Wait for the returned references with Cluster.get before any other call.

        serving: how the drafter is served; None without a drafter. drafter_folder: folder of the first drafter. first_step:
        number of steps before this start. It is part of each engine's seed, so that a resumed engine does not draw the noise
        of the first steps again.
        """
        policy = self._config.policy
        self._specs = [
            EngineSpec(
                rollout=self._config.rollout,
                model_path=str(self._nodes.model_path),
                drafter_folder=None if serving is None else str(drafter_folder),
                serving=serving,
                seed=derived_seed("engine", self._config.seed, i, first_step),
                scratch=str(self._nodes.scratch[node] / _role(i)),
                versions=self._current.versions,
                weight_transfer=policy.weight_transfer if policy.sends_without_file else "files",
                adapters=policy.lora is not None,
            )
            for i, node in enumerate(self.node_of)
        ]
        return [actor.start.remote(spec) for actor, spec in zip(self._actors, self._specs, strict=True)]

    def _new_actor(self, engine: int) -> Any:
        node, ranks = self.node_of[engine], self._config.rollout.tensor_parallel_size
        environment = self._nodes.call(node, engine_environment, None, ranks)
        environment |= temporary_files(self._nodes.scratch[node])
        environment |= {name: os.environ[name] for name in (MODEL_RUNNER,) if name in os.environ}
        if self._config.policy.weight_transfer == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # workers get GPU memory handles as pickles
        actor = self._cluster.start(EngineActor, _role(engine), environment, max_concurrency=MOST_CALLS)
        actor.load_library.remote()
        return actor

    @property
    def in_dispatch(self) -> list[int]:
        """The engines that may be given groups of requests."""
        return [engine for engine in range(len(self._actors)) if engine not in self._away]

    def lose(self, engine: int, failure: RunFailure) -> None:
        """Quarantine an engine and begin to start it again, MOST_RESTARTS times at most. One that does not start stays
        there. Raises the failure when too few engines are left."""
        if engine in self._away:
            return
        if len(self.in_dispatch) - 1 < self._config.cluster.min_engines:
            raise failure
        self._deaths[engine] += 1
        self._away.add(engine)
        self._cluster.kill(self._actors[engine])
        if self._deaths[engine] > MOST_RESTARTS:
            return
        try:
            self._actors[engine] = self._new_actor(engine)
        except RunFailure:  # its node is gone
            return
        spec = self._specs[engine]
        spec = self._specs[engine] = replace(spec, seed=derived_seed(spec.seed, "started again"))  # draws nothing twice
        actor = self._actors[engine]
        self._watch(actor.start.remote(spec), lambda _: self.come_back(engine), lambda _: self._cluster.kill(actor))

    def begin(self, engine: int, method: Method[P, T], *args: P.args, **options: P.kwargs) -> Reply[T]:
        """Begin a call to one engine."""
        return begin(self._actors[engine], method, *args, **options)

    def call(self, engine: int, method: Method[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return the result of a call to one engine, whose death is the caller's to deal with."""
        [result] = self._cluster.get([self.begin(engine, method, *args, **options).reference])
        return result

    def call_all(self, method: Method[P, T], *args: P.args, **options: P.kwargs) -> dict[int, T]:
        """Make a call to all engines, and return the results by engine as `results` does."""
        return self.results({engine: self.begin(engine, method, *args, **options) for engine in self.in_dispatch})[0]

    def results(
        self, begun: dict[int, Reply[T]], seconds: float | None = None
    ) -> tuple[dict[int, T], WeightUpdateRefused | None]:
        """Return the results of these calls by engine, and a refusal if there was one. An engine whose process dies, or
        that does not answer within `seconds`, is quarantined and has no result."""
        results, refusal = dict[int, T](), None
        for engine, reply in begun.items():
            try:
                [results[engine]] = self._cluster.get([reply.reference], seconds)
            except WeightUpdateRefused as error:
                refusal = error
            except RunFailure as failure:
                self.lose(engine, failure)
        return results, refusal


def _role(engine: int) -> str:
    return f"rollout_{engine}"
