"""The rollout engines as the controller sees them: plain calls that hide Ray. All but `start` and `begin_generate` wait."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster, free_port, temporary_files
from cotrain.process.failures import RunFailure
from cotrain.process.threads import engine_environment
from cotrain.records import Rollout, RolloutBatch, RolloutRequest, SwapReport, Versions, WeightPayload, Window
from cotrain.roles.learners import Learner
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.rollout.vllm.arguments import EngineSpec
from cotrain.transport.nodes import Nodes
from cotrain.transport.payload import WeightUpdateRefused
from drafters.base import ServingSpec

MOST_CALLS = 10_000
"""Maximum number of concurrent calls of an engine. A further call would wait for another to end, and a weight update could wait
as long as a rollout takes; the stream gives an engine far fewer groups. Ray's concurrency groups do not help, because each has
its own event loop and vLLM's asynchronous engine lives in a single one."""


MOST_RESTARTS = 3
"""Restarts of an engine. One that dies more often stays in quarantine, because its deaths are no accident."""

SETTINGS = ("time_draft_lengths", "set_num_speculative_tokens")
"""Calls with a lasting effect: an engine that is started again gets the last one of each."""

KEPT_DRAFTER = "kept/rank_0/drafter.safetensors"
"""File in an engine's folder: the drafter that the engine was last sent, see ServedWeights."""

HISTORY = "history.safetensors"
"""File in an engine's folder: the history that the engine drafts from, for another one that is started again."""

UPDATE_SECONDS = 300.0
"""An engine that has not checked or loaded weights after this time counts as dead; a few seconds are usual."""


class EngineActor(Actor):
    """A rollout engine in its own process. vLLM is imported only there."""

    def load_library(self) -> None:
        """Import vLLM while nobody waits for it, because the import takes seconds."""
        import vllm.v1.engine.async_llm  # noqa: F401
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from cotrain.rollout.vllm.cpu import fork_engine_core

            fork_engine_core()

    async def start(self, spec: EngineSpec) -> None:
        """See RolloutEngine.start."""
        from cotrain.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(spec)
        await self._engine.start()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the engine; calls may overlap."""
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
        self._settings: dict[str, tuple[Any, ...]] = {}  # the last call of each of SETTINGS
        self._learner: Learner | None = None
        self._connected: list[Any] = []  # actors that the learner sends the policy to
        self._returning: list[int] = []  # restarted engines that wait for the learner's next update
        self._policy: tuple[WeightPayload, int] | None = None  # the last update that was sent, with its version
        self._drafter: tuple[WeightPayload, int] | None = None

    def receive_from(self, learner: Learner) -> None:
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
        actor, node = self._actors[engine], self.node_of[engine]
        if self._policy is not None:
            payload, version = self._policy
            here = replace(payload, path=self._nodes.bring(payload.path, node))
            self._cluster.get([actor.call.remote("update_policy", here, version)])
        self._take_over(engine, self.in_dispatch[0])
        self._away.remove(engine)

    def _take_over(self, engine: int, other: int) -> None:
        """Give an engine that already serves the current policy the drafter, the history and the settings of another one."""
        actor = self._actors[engine]
        if self._drafter is not None:  # the others keep the file
            path = self._nodes.bring(f"{self._specs[other].scratch}/{KEPT_DRAFTER}", self.node_of[engine])
            payload = replace(self._drafter[0], path=path)
            self._cluster.get([actor.call.remote("update_drafter", payload, self._drafter[1])])
        for record, draft in ((self._policy, False), (self._drafter, True)):
            if record is not None and (draft or self._learner is None):  # what the learner sends is compared on arrival
                digests = record[0].digests
                [served] = self._cluster.get([actor.call.remote("served_digests", sorted(digests), draft)])
                if served != digests:
                    raise RunFailure(f"{self._roles[engine]} was started again and does not serve what the others do")
        if self._drafts_from_history:
            path = f"{self._specs[other].scratch}/{HISTORY}"
            self._cluster.get([self._actors[other].call.remote("history", "index.save", path)])
            here = self._nodes.bring(path, self.node_of[engine])
            self._cluster.get([actor.call.remote("history", "index.load", here)])
        for method, args in self._settings.items():
            self._cluster.get([actor.call.remote(method, *args)])

    # -- calls -------------------------------------------------------------------------------------------------------

    def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """Generate one response to each request, in the order given; all engines take requests in turn."""
        actors = [self._actors[engine] for engine in self.in_dispatch[: len(requests)]]
        shares = [requests[i :: len(actors)] for i in range(len(actors))]
        calls = [a.call.remote("generate", s, tap, **overrides) for a, s in zip(actors, shares, strict=True)]
        merged = merge(self._cluster.get(calls))
        by_key = {(r.prompt_id, r.sample_index): r for r in merged.rollouts}
        return replace(merged, rollouts=[by_key[request.prompt_id, request.sample_index] for request in requests])

    def begin_generate(self, engine: int, requests: list[RolloutRequest], tap: bool) -> Any:
        """Begin to generate one response to each request on one engine. Returns the reference of the RolloutBatch."""
        return self._actors[engine].call.remote("generate", requests, tap)

    def take_windows(self) -> dict[int, Window]:
        """Return what the speculation controller of each engine has seen since the last call."""
        return self._ask(dict.fromkeys(self.in_dispatch, ("take_window",)))[0]

    # -- history ------------------------------------------------------------------------------------------------------

    def share_history(self, engine: int, rollouts: Sequence[Rollout]) -> None:
        """Let all other engines draft from what this one has generated, if they draft from history."""
        if self._drafts_from_history:
            self._ask({other: ("add_history", rollouts) for other in self.in_dispatch if other != engine})

    def save_history(self, path: Path) -> None:
        """Write the history of one engine; all have the same one, apart from the order of the rollouts."""
        self._ask({self.in_dispatch[0]: ("history", "index.save", str(path))})

    def proposer_metrics(self) -> dict[str, float]:
        """Return drafts, draft tokens and accepted tokens by proposer since the last call, and the size of the history."""
        counts: Counter[str] = Counter()
        reports = self.call("history", "take_report")
        for report in reports:
            counts.update(report["counts"])
        return dict(counts) | reports[0]["state"]

    # -- weights ------------------------------------------------------------------------------------------------------

    def update_policy(self, payload: WeightPayload, policy_version: int, keep_kv: bool = False) -> SwapReport:
        """Serve new policy weights on all engines. Reports the time of the slowest engine."""
        returned, num_bytes = self._send_policy(keep_kv) if self._learner else ([], payload.num_bytes)
        reports, refusal = self._update("update_policy", payload, policy_version, keep_kv)
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
        self._ask(dict.fromkeys(self.in_dispatch, ("hold", keep_kv)), UPDATE_SECONDS)
        actors = [self._actors[engine] for engine in self.in_dispatch]
        if actors != self._connected:
            address, port = self._cluster.node_address(learner.node), self._nodes.call(learner.node, free_port)
            learner.call("connect_engines", actors, self._config.rollout.tensor_parallel_size, address, port)
            self._connected = actors
        return [engine for engine in returning if engine in self.in_dispatch], learner.call("send_weights")

    def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights on all engines, or on none. expected_rates: see RolloutEngine.update_drafter.

        All engines check the weights before one loads them. Raises WeightUpdateRefused; all engines then keep what they had.
        """
        if len(self.in_dispatch) > 1:
            _, refusal = self._update("check_drafter", payload)
            if refusal is not None:
                raise refusal
        reports, refusal = self._update("update_drafter", payload, drafter_version, expected_rates)
        if refusal is not None:
            self._ask(dict.fromkeys(reports, ("undo_drafter_update",)))
            raise refusal
        self._drafter = payload, drafter_version
        return max(reports.values(), key=lambda report: report.seconds)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of RolloutEngine on all engines and return their results."""
        if method in SETTINGS:
            self._settings[method] = args
        results, _ = self._ask(dict.fromkeys(self.in_dispatch, (method, *args)))
        return list(results.values())

    def _update(
        self, method: str, payload: WeightPayload, *args: Any
    ) -> tuple[dict[int, Any], WeightUpdateRefused | None]:
        """Bring the payload's file to each engine's node, once per node, and call a method of each engine with it."""
        there: dict[str, str] = {}
        for engine in self.in_dispatch:
            node = self.node_of[engine]
            try:
                there[node] = there.get(node) or self._nodes.bring(payload.path, node)
            except RunFailure as failure:
                self.lose(engine, failure)
        calls = {e: (method, replace(payload, path=there[self.node_of[e]]), *args) for e in self.in_dispatch}
        return self._ask(calls, UPDATE_SECONDS)

    def _ask(
        self, calls: dict[int, tuple[Any, ...]], seconds: float | None = None
    ) -> tuple[dict[int, Any], WeightUpdateRefused | None]:
        """Call a method of each of these engines. Returns the results by engine, and a refusal if there was one.

        An engine whose process dies, or that does not answer within `seconds`, is quarantined and has no result.
        """
        begun = {engine: self._actors[engine].call.remote(*call) for engine, call in calls.items()}
        results, refusal = {}, None
        for engine, reference in begun.items():
            try:
                [results[engine]] = self._cluster.get([reference], seconds)
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
