"""The rollout engines as the controller sees them: plain calls, with Ray behind them. All but `start` wait."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process import threads
from cotrain.process.cluster import Cluster, Placement
from cotrain.records import (
    GainReport,
    RolloutBatch,
    RolloutRequest,
    SwapReport,
    Versions,
    WeightPayload,
)
from cotrain.roles.actors import EngineActor
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.rollout.spec import EngineSpec
from cotrain.transport.payload import WeightUpdateRefused
from drafters.base import ServingSpec


class RolloutEngines:
    """All vLLM replicas; they serve the same versions."""

    def __init__(self, cluster: Cluster, config: RunConfig, placement: Placement):
        """Start the processes, which import vLLM meanwhile; `start` loads the models."""
        self._cluster = cluster
        environment = threads.engine_environment(threads.num_cores())
        options: dict[str, Any] = {"environment": environment, "gpus": placement.gpus, "max_concurrency": 8}
        self._actors = [
            cluster.start(EngineActor, cluster.log_file(f"rollout_{i}"), **options)
            for i in range(config.rollout.num_engines)
        ]
        for actor in self._actors:
            actor.load_library.remote()

    def start(self, specs: list[EngineSpec]) -> Any:
        """Begin to load the models; `wait_until_started` waits for it."""
        return [actor.start.remote(spec) for actor, spec in zip(self._actors, specs, strict=True)]

    def wait_until_started(self, started: Any) -> None:
        """Wait until all models are loaded."""
        self._cluster.get(started)

    def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """One response to each request, in the order given. A prompt's samples go to one engine, for its cache."""
        prompts = list(dict.fromkeys(request.prompt_id for request in requests))
        engine_of = {prompt: i % len(self._actors) for i, prompt in enumerate(prompts)}
        shares = [[r for r in requests if engine_of[r.prompt_id] == i] for i in range(len(self._actors))]
        working = [(actor, share) for actor, share in zip(self._actors, shares, strict=True) if share]
        batches = [a.call.remote("generate", share, tap, **overrides) for a, share in working]
        return _merge(requests, self._cluster.get(batches))

    def update_policy(self, payload: WeightPayload, policy_version: int) -> SwapReport:
        """Serve new policy weights everywhere."""
        return _slowest(self.call("update_policy", payload, policy_version))

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
                reports.append(self._cluster.get(update))
                switched.append(actor)
            except WeightUpdateRefused as error:
                refusal = error
        if refusal is not None:
            self._cluster.get([actor.call.remote("undo_drafter_update") for actor in switched])
            raise refusal
        return _slowest(reports)

    def time_draft_lengths(self, prompts: Sequence[list[int]]) -> int:
        """Time engine steps in all engines at once, as they will run; the number of timings of each.

        From then on each engine chooses its draft lengths. See RolloutEngine.time_draft_lengths.
        """
        return min(self.call("time_draft_lengths", prompts))

    def describe_speculation(self) -> str:
        """The draft lengths in use, and why."""
        words = self.call("describe_speculation")
        if len(set(words)) == 1:
            return words[0]
        return "; ".join(f"engine {i}: {text}" for i, text in enumerate(words))

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of RolloutEngine on all engines; the result of each."""
        return self._cluster.get([actor.call.remote(method, *args) for actor in self._actors])


def _slowest(reports: list[SwapReport]) -> SwapReport:
    return max(reports, key=lambda report: report.seconds)


def _merge(requests: list[RolloutRequest], batches: list[RolloutBatch]) -> RolloutBatch:
    by_key = {(r.prompt_id, r.sample_index): r for batch in batches for r in batch.rollouts}
    gains = [batch.gain for batch in batches if batch.gain is not None]
    stats: Counter[str] = Counter()
    for batch in batches:
        stats.update(batch.feature_stats)
    return RolloutBatch(
        rollouts=[by_key[request.prompt_id, request.sample_index] for request in requests],
        features=[shard for batch in batches for shard in batch.features],
        speculation=total_counts(batch.speculation for batch in batches),
        seconds=max(batch.seconds for batch in batches),
        num_generated_tokens=sum(batch.num_generated_tokens for batch in batches),
        feature_stats=dict(stats),
        gain=sum(gains, start=GainReport()) if gains else None,
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

    drafter: its folder and how it is served. first_step: steps made before; a resumed engine must not draw the first
    steps' noise again.
    """
    folder, serving = drafter or (None, None)
    return [
        EngineSpec(
            rollout=config.rollout,
            model_path=str(model_path),
            drafter_folder=None if folder is None else str(folder),
            serving=serving,
            seed=engine_seed(config.seed, i, first_step),
            scratch=str(scratch / f"rollout_{i}"),
            versions=versions,
        )
        for i in range(config.rollout.num_engines)
    ]


def engine_seed(seed: int, engine: int, first_step: int) -> int:
    """A seed of its own for every engine of every run, and for every step that a run is resumed after.

    A run that is resumed twice after the same step repeats nothing that it keeps: what the first attempt made after
    that step is discarded.
    """
    key = f"engine/{seed}/{engine}/{first_step}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1
