"""The rollout engines as the controller sees them: plain calls, with Ray behind them. All but `start` wait."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process import threads
from cotrain.process.children import Actor
from cotrain.process.cluster import Cluster
from cotrain.records import GainReport, RolloutBatch, RolloutRequest, SwapReport, Versions, WeightPayload
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.rollout.vllm.arguments import EngineSpec
from cotrain.transport.payload import WeightUpdateRefused
from drafters.base import ServingSpec

MOST_CALLS = 10_000
"""Calls of an engine that may be under way. A call above that waits for another to end, which for an update of the weights
could take as long as a rollout; the stream gives an engine far fewer groups. Ray's concurrency groups are no way out:
each has an event loop of its own, and vLLM's asynchronous engine lives in one."""


class EngineActor(Actor):
    """A rollout engine in its own process. What it needs of vLLM is imported there."""

    def load_library(self) -> None:
        """Import vLLM, which takes seconds, while nobody waits for it."""
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
    """All vLLM replicas; they serve the same versions."""

    def __init__(self, cluster: Cluster, config: RunConfig):
        """Start the processes, which import vLLM meanwhile; `start` loads the models."""
        self._cluster = cluster
        environment = threads.engine_environment(threads.num_cores())
        roles = [f"rollout_{i}" for i in range(config.rollout.num_engines)]
        options = {"max_concurrency": MOST_CALLS}
        self._actors = [cluster.start(EngineActor, role, environment, **options) for role in roles]
        for actor in self._actors:
            actor.load_library.remote()

    def start(self, specs: list[EngineSpec]) -> list[Any]:
        """Begin to load the models. Cluster.get waits for what this returns; no other call may come before."""
        return [actor.start.remote(spec) for actor, spec in zip(self._actors, specs, strict=True)]

    def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """One response to each request, in the order given. A prompt's samples go to one engine, for its cache."""
        prompts = list(dict.fromkeys(request.prompt_id for request in requests))
        engine_of = {prompt: self._actors[i % len(self._actors)] for i, prompt in enumerate(prompts)}
        shares = defaultdict(list)
        for request in requests:
            shares[engine_of[request.prompt_id]].append(request)
        batches = [engine.call.remote("generate", share, tap, **overrides) for engine, share in shares.items()]
        merged = merge(self._cluster.get(batches))
        by_key = {(r.prompt_id, r.sample_index): r for r in merged.rollouts}
        return replace(merged, rollouts=[by_key[request.prompt_id, request.sample_index] for request in requests])

    def begin_generate(self, engine: int, requests: list[RolloutRequest], tap: bool) -> Any:
        """Begin one response to each request on one engine. Returns the reference of their RolloutBatch."""
        return self._actors[engine].call.remote("generate", requests, tap)

    def take_gain(self) -> GainReport | None:
        """What speculation gained in all engines since the last call; None while draft lengths are fixed."""
        gains = [window.gain for window in self.call("take_window") if window.gain is not None]
        return sum(gains, start=GainReport()) if gains else None

    def update_policy(self, payload: WeightPayload, policy_version: int, keep_kv: bool = False) -> SwapReport:
        """Serve new policy weights everywhere. Reports the slowest engine's update."""
        return max(self.call("update_policy", payload, policy_version, keep_kv), key=lambda report: report.seconds)

    def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights on all engines, or on none. expected_rates: see RolloutEngine.update_drafter.

        All engines check the weights before one takes them. Raises WeightUpdateRefused; all go on with what they had.
        """
        if len(self._actors) > 1:
            self.call("check_drafter", payload)
        updates = [a.call.remote("update_drafter", payload, drafter_version, expected_rates) for a in self._actors]
        reports, switched, refusal = [], [], None
        for actor, update in zip(self._actors, updates, strict=True):
            try:
                reports += self._cluster.get([update])
                switched.append(actor)
            except WeightUpdateRefused as error:
                refusal = error
        if refusal is not None:
            self._cluster.get([actor.call.remote("undo_drafter_update") for actor in switched])
            raise refusal
        return max(reports, key=lambda report: report.seconds)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of RolloutEngine on all engines; the result of each."""
        return self._cluster.get([actor.call.remote(method, *args) for actor in self._actors])


def merge(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Several batches as one."""
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


def engine_specs(
    config: RunConfig,
    model_path: Path,
    drafter: tuple[Path, ServingSpec] | None,
    scratch: Path,
    versions: Versions,
    first_step: int,
) -> list[EngineSpec]:
    """One spec a replica.

    drafter: its folder and how it is served. first_step: steps made before. Every engine of every run has a seed of its
    own for every step that a run is resumed after, so that a resumed engine does not draw the first steps' noise again.
    """
    folder, serving = drafter or (None, None)
    return [
        EngineSpec(
            rollout=config.rollout,
            model_path=str(model_path),
            drafter_folder=None if folder is None else str(folder),
            serving=serving,
            seed=derived_seed("engine", config.seed, i, first_step),
            scratch=str(scratch / f"rollout_{i}"),
            versions=versions,
        )
        for i in range(config.rollout.num_engines)
    ]


def derived_seed(*parts: object) -> int:
    """A sampling seed of its own for these parts, below 2**31."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
