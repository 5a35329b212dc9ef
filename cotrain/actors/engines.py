"""The rollout engines in processes of their own, and the one client of all of them. All but `start` and `begin_generate` wait."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cotrain.acceptance_stats import total_counts
from cotrain.actors.policy import EngineClient, Policy
from cotrain.config.schema import RunConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.processes import import_vllm
from cotrain.engine.worker import EngineWorker
from cotrain.process.calls import Reply, begin
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster, free_port, temporary_files
from cotrain.process.failures import RunFailure
from cotrain.process.threads import engine_environment
from cotrain.records import Rollout, RolloutBatch, RolloutRequest, SwapReport, Versions, WeightPayload, Window
from cotrain.transport.nodes import Nodes
from cotrain.weights.payload import WeightUpdateRefused
from drafters.base import ServingSpec

MOST_CALLS = 10_000
"""Maximum number of concurrent calls of an engine. A further call would wait for another to end, and a weight update could wait
as long as a rollout takes; the stream gives an engine far fewer groups. Ray's concurrency groups do not help, because each has
its own event loop and vLLM's asynchronous engine lives in a single one."""


MOST_RESTARTS = 3
"""Restarts of an engine. One that dies more often stays in quarantine, because its deaths are no accident."""

KEPT_DRAFTER = "kept/rank_0/drafter.safetensors"
"""File in an engine's folder: the drafter that the engine was last sent, see ServedWeights."""

HISTORY = "history.safetensors"
"""File in an engine's folder: the history that the engine drafts from, for another one that is started again."""

UPDATE_SECONDS = 300.0
"""An engine that has not checked or loaded weights after this time counts as dead; a few seconds are usual."""

T = TypeVar("T")


class EngineActor(Actor):
    """A rollout engine in its own process. vLLM is imported only there."""

    def load_library(self) -> None:
        """Import vLLM while nobody waits for it, because the import takes seconds."""
        import_vllm()

    async def start(self, spec: EngineSpec) -> None:
        """See RolloutEngine.start."""
        self._engine = RolloutEngine(spec)
        await self._engine.start()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the engine, for `begin`; calls may overlap."""
        return await getattr(self._engine, method)(*args, **options)


class RolloutEngines:
    """All vLLM replicas, which serve the same versions.

    A replica whose process dies is quarantined: it gets no calls until it has been started again and serves the same policy
    and drafter as the others.
    """

    def __init__(self, cluster: Cluster, nodes: Nodes, config: RunConfig):
        """Start the processes, which import vLLM in the background; `start` loads the models."""
        self._cluster, self._nodes, self._config = cluster, nodes, config
        self._transfer = config.policy.weight_transfer
        self._drafts_from_history = config.rollout.history is not None
        self._roles = [f"rollout_{i}" for i in range(config.rollout.num_engines)]
        self.node_of = [cluster.node_of[role] for role in self._roles]
        self._actors = [self._new_actor(i) for i in range(len(self._roles))]
        self._away: set[int] = set()  # quarantined engines
        self.starts: Callable[[int, Any], None] = lambda engine, reference: None
        """Called with an engine that is being restarted and the reference of its start; `come_back` must follow the start."""
        self._deaths: Counter[int] = Counter()
        # The last call of each kind with a lasting effect. An engine that is started again gets them too.
        self._settings: dict[str, Callable[[Any], Reply[Any]]] = {}
        self._learner: Policy | None = None
        self._connected: list[Any] = []  # actors that the learner sends the policy to
        self._returning: list[int] = []  # restarted engines that wait for the learner's next update
        self._policy: tuple[WeightPayload, int] | None = None  # the last update that was sent, with its version
        self._drafter: tuple[WeightPayload, int] | None = None

    def receive_from(self, learner: Policy) -> None:
        """Let this learner send the policy, unless policy.weight_transfer is "files"."""
        self._learner = learner if self._transfer != "files" else None

    def start(
        self, serving: ServingSpec | None, versions: Versions, first_step: int, drafter_folder: Path
    ) -> list[Any]:
        """Begin to load the models. Wait for the returned references with Cluster.get before any other call.

        serving: how the drafter is served; None without a drafter. drafter_folder: folder of the first drafter. first_step:
        number of steps before this start. It is part of each engine's seed, so that a resumed engine does not draw the noise
        of the first steps again.
        """
        self._specs = [
            EngineSpec(
                rollout=self._config.rollout,
                model_path=str(self._nodes.model_path),
                drafter_folder=None if serving is None else str(drafter_folder),
                serving=serving,
                seed=derived_seed("engine", self._config.seed, i, first_step),
                scratch=str(self._nodes.scratch[node] / self._roles[i]),
                versions=versions,
                weight_transfer=self._config.policy.weight_transfer,
            )
            for i, node in enumerate(self.node_of)
        ]
        return [actor.start.remote(spec) for actor, spec in zip(self._actors, self._specs, strict=True)]

    def _new_actor(self, engine: int) -> Any:
        environment = self._nodes.call(
            self.node_of[engine], engine_environment, None, self._config.rollout.tensor_parallel_size
        )
        environment |= temporary_files(self._nodes.scratch[self.node_of[engine]])
        if self._transfer == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # workers get GPU memory handles as pickles
        actor = self._cluster.start(EngineActor, self._roles[engine], environment, max_concurrency=MOST_CALLS)
        actor.load_library.remote()
        return actor

    # -- engines that die --------------------------------------------------------------------------------------------

    @property
    def in_dispatch(self) -> list[int]:
        """The engines that may be given groups of requests."""
        return [engine for engine in range(len(self._actors)) if engine not in self._away]

    def lose(self, engine: int, failure: RunFailure) -> None:
        """Quarantine an engine and begin to start it again, MOST_RESTARTS times at most. `come_back` completes the restart.

        Raises the failure when too few engines are left.
        """
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
        self.starts(engine, self._actors[engine].start.remote(spec))

    def give_up(self, engine: int, _: RunFailure) -> None:
        """Kill what is left of an engine whose restart has failed. It stays in quarantine."""
        self._cluster.kill(self._actors[engine])

    def come_back(self, engine: int) -> None:
        """Give a restarted engine the current policy, drafter and settings, check what it serves, and end its quarantine.

        If the learner sends the policy, all this waits for the next `update_policy`. Raises RunFailure when the engine does
        not serve the same weights as the others.
        """
        if self._transfer != "files":
            self._returning.append(engine)
            return
        if self._policy is not None:
            payload, version = self._policy
            here = replace(payload, path=self._nodes.bring(payload.path, self.node_of[engine]))
            self._wait(begin(self._actors[engine], RolloutEngine.update_policy, here, version))
        self._take_over(engine, self.in_dispatch[0])
        self._away.remove(engine)

    def _take_over(self, engine: int, other: int) -> None:
        """Give an engine that already serves the current policy the drafter, the history and the settings of another one."""
        if self._drafter is not None:  # the others keep the file
            path = self._nodes.bring(f"{self._specs[other].scratch}/{KEPT_DRAFTER}", self.node_of[engine])
            payload, version = self._drafter
            here = replace(payload, path=path)
            self._wait(begin(self._actors[engine], RolloutEngine.update_drafter, here, version))
        for record, draft in ((self._policy, False), (self._drafter, True)):
            if record is not None and (draft or self._learner is None):  # what the learner sends is compared on arrival
                digests = record[0].digests
                names, actor = sorted(digests), self._actors[engine]
                if self._wait(begin(actor, RolloutEngine.served_digests, names, draft)) != digests:
                    raise RunFailure(f"{self._roles[engine]} was started again and does not serve what the others do")
        if self._drafts_from_history:
            path = f"{self._specs[other].scratch}/{HISTORY}"
            self._wait(begin(self._actors[other], RolloutEngine.on_workers, EngineWorker.save_history, path))
            brought = self._nodes.bring(path, self.node_of[engine])
            self._wait(begin(self._actors[engine], RolloutEngine.on_workers, EngineWorker.load_history, brought))
        for setting in self._settings.values():
            self._wait(setting(self._actors[engine]))

    # -- calls -------------------------------------------------------------------------------------------------------

    def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """Generate one response to each request, in the order given; all engines take requests in turn."""
        actors = [self._actors[engine] for engine in self.in_dispatch[: len(requests)]]
        shares = [requests[i :: len(actors)] for i in range(len(actors))]
        calls = [begin(a, RolloutEngine.generate, s, tap, **overrides) for a, s in zip(actors, shares, strict=True)]
        merged = merge(self._cluster.get([call.reference for call in calls]))
        by_key = {(r.prompt_id, r.sample_index): r for r in merged.rollouts}
        return replace(merged, rollouts=[by_key[request.prompt_id, request.sample_index] for request in requests])

    def begin_generate(self, engine: int, requests: list[RolloutRequest], tap: bool) -> Any:
        """Begin to generate one response to each request on one engine. Returns the reference of the RolloutBatch."""
        return begin(self._actors[engine], RolloutEngine.generate, requests, tap).reference

    def take_windows(self) -> dict[int, Window]:
        """Return what the speculation controller of each engine has seen since the last call."""
        return self._ask(self.in_dispatch, lambda e: begin(e, RolloutEngine.take_window))

    # -- history ------------------------------------------------------------------------------------------------------

    def share_history(self, engine: int, rollouts: Sequence[Rollout]) -> None:
        """Let all other engines draft from what this one has generated, if they draft from history."""
        if self._drafts_from_history:
            others = [other for other in self.in_dispatch if other != engine]
            self._ask(others, lambda e: begin(e, RolloutEngine.add_history, rollouts))

    def save_history(self, path: Path) -> None:
        """Write the history of one engine; all have the same one, apart from the order of the rollouts."""
        save, first = EngineWorker.save_history, self.in_dispatch[:1]
        self._ask(first, lambda e: begin(e, RolloutEngine.on_workers, save, str(path)))

    def load_history(self, path: Path) -> None:
        """Let all engines draft from what `save_history` has written."""
        self._ask(self.in_dispatch, lambda e: begin(e, RolloutEngine.on_workers, EngineWorker.load_history, str(path)))

    def proposer_metrics(self) -> dict[str, float]:
        """Return drafts, draft tokens and accepted tokens by proposer since the last call, and the size of the history."""
        counts: Counter[str] = Counter()
        take = EngineWorker.take_history_report
        reports = [*self._ask(self.in_dispatch, lambda e: begin(e, RolloutEngine.on_workers, take)).values()]
        for report in reports:
            counts.update(report["counts"])
        return dict(counts) | reports[0]["state"]

    # -- weights ------------------------------------------------------------------------------------------------------

    def update_policy(self, payload: WeightPayload, policy_version: int, keep_kv: bool = False) -> SwapReport:
        """Serve new policy weights on all engines. Reports the time of the slowest engine."""
        sent = self._learner is not None
        returned, num_bytes = self._send_policy(keep_kv) if sent else ([], payload.num_bytes)
        calls = {
            engine: begin(self._actors[engine], RolloutEngine.update_policy, here, policy_version, keep_kv)
            for engine, here in self._brought(payload).items()
        }
        reports, refusal = self._results(calls, UPDATE_SECONDS)
        if refusal is not None:
            raise RunFailure(f"an engine refused policy {policy_version}: {refusal}")
        self._policy = payload, policy_version
        for engine in returned:
            self._take_over(engine, min({*self.in_dispatch} - {*returned}))
        return SwapReport(max(report.seconds for report in reports.values()), num_bytes)

    def _send_policy(self, keep_kv: bool) -> tuple[list[int], int]:
        """Let the learner send its weights to the engines, which stay paused until `update_policy`.

        An engine that dies meanwhile ends the run, because the learner waits for it. Returns the restarted engines that take
        part from now on, and the size of the weights in bytes.
        """
        learner, returning, self._returning = self._learner, self._returning, []
        assert learner is not None
        self._away.difference_update(returning)
        held = {engine: begin(self._actors[engine], RolloutEngine.hold, keep_kv) for engine in self.in_dispatch}
        self._results(held, UPDATE_SECONDS)
        actors = [self._actors[engine] for engine in self.in_dispatch]
        if actors != self._connected:
            address, port = self._cluster.node_address(learner.node), self._nodes.call(learner.node, free_port)
            learner.connect_engines(EngineClient(actors, self._config.rollout.tensor_parallel_size), address, port)
            self._connected = actors
        return [engine for engine in returning if engine in self.in_dispatch], learner.send_weights()

    def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights on all engines, or on none. expected_rates: see RolloutEngine.update_drafter.

        All engines check the weights before one loads them. Raises WeightUpdateRefused; all engines then keep what they had.
        """
        if len(self.in_dispatch) > 1:
            here = self._brought(payload)
            checks = {e: begin(self._actors[e], RolloutEngine.check_drafter, its) for e, its in here.items()}
            _, refusal = self._results(checks, UPDATE_SECONDS)
            if refusal is not None:
                raise refusal
        calls = {
            engine: begin(self._actors[engine], RolloutEngine.update_drafter, here, drafter_version, expected_rates)
            for engine, here in self._brought(payload).items()
        }
        reports, refusal = self._results(calls, UPDATE_SECONDS)
        if refusal is not None:
            self._ask(list(reports), lambda e: begin(e, RolloutEngine.undo_drafter_update))
            raise refusal
        self._drafter = payload, drafter_version
        return max(reports.values(), key=lambda report: report.seconds)

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]:
        """See RolloutEngine.served_digests; of each engine."""
        return [*self._ask(self.in_dispatch, lambda e: begin(e, RolloutEngine.served_digests, names, draft)).values()]

    # -- switches and caches -------------------------------------------------------------------------------------------

    def time_draft_lengths(self, prompts: list[list[int]]) -> list[list[list[float]]]:
        """See RolloutEngine.time_draft_lengths; of each engine."""
        self._settings["timing"] = call = lambda e: begin(e, RolloutEngine.time_draft_lengths, prompts)
        return list(self._ask(self.in_dispatch, call).values())

    def set_num_speculative_tokens(self, num: int | None) -> None:
        """See RolloutEngine.set_num_speculative_tokens."""
        self._settings["length"] = call = lambda e: begin(e, RolloutEngine.set_num_speculative_tokens, num)
        self._ask(self.in_dispatch, call)

    def describe_speculation(self) -> list[str]:
        """See RolloutEngine.describe_speculation; of each engine."""
        return list(self._ask(self.in_dispatch, lambda e: begin(e, RolloutEngine.describe_speculation)).values())

    def reset_prefix_cache(self) -> None:
        """See RolloutEngine.reset_prefix_cache."""
        self._ask(self.in_dispatch, lambda e: begin(e, RolloutEngine.reset_prefix_cache))

    def clear_drafter_cache(self) -> None:
        """See RolloutEngine.clear_drafter_cache."""
        self._ask(self.in_dispatch, lambda e: begin(e, RolloutEngine.clear_drafter_cache))

    # -- how calls are made --------------------------------------------------------------------------------------------

    def _brought(self, payload: WeightPayload) -> dict[int, WeightPayload]:
        """Bring the payload's file to each engine's node, once per node. An engine whose node is gone is quarantined."""
        there: dict[str, str] = {}
        for engine in self.in_dispatch:
            node = self.node_of[engine]
            try:
                there[node] = there.get(node) or self._nodes.bring(payload.path, node)
            except RunFailure as failure:
                self.lose(engine, failure)
        return {engine: replace(payload, path=there[self.node_of[engine]]) for engine in self.in_dispatch}

    def _wait(self, reply: Reply[T]) -> T:
        """Return the result of a call to one engine, whose death is the caller's to deal with."""
        [result] = self._cluster.get([reply.reference])
        return result

    def _ask(self, engines: Iterable[int], call: Callable[[Any], Reply[T]]) -> dict[int, T]:
        """Make a call to each of these engines, and return the results by engine as `_results` does."""
        return self._results({engine: call(self._actors[engine]) for engine in engines})[0]

    def _results(
        self, begun: dict[int, Reply[T]], seconds: float | None = None
    ) -> tuple[dict[int, T], WeightUpdateRefused | None]:
        """Return the results of these calls by engine, and a refusal if there was one.

        An engine whose process dies, or that does not answer within `seconds`, is quarantined and has no result.
        """
        results, refusal = dict[int, T](), None
        for engine, reply in begun.items():
            try:
                [results[engine]] = self._cluster.get([reply.reference], seconds)
            except WeightUpdateRefused as error:
                refusal = error
            except RunFailure as failure:
                self.lose(engine, failure)
        return results, refusal


def merge(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Merge batches that engines generated at the same time; `seconds` is that of the slowest."""
    stats: Counter[str] = Counter()
    for batch in batches:
        stats.update(batch.feature_stats)
    return RolloutBatch(
        rollouts=[rollout for batch in batches for rollout in batch.rollouts],
        features=[shard for batch in batches for shard in batch.features],
        speculation=total_counts(batch.speculation for batch in batches),
        seconds=max(batch.seconds for batch in batches),
        num_generated_tokens=sum(batch.num_generated_tokens for batch in batches),
        feature_stats=dict(stats),
    )


def derived_seed(*parts: object) -> int:
    """Return a sampling seed below 2**31, a hash of these parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
