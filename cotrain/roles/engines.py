"""Rollout engines and policy learner as the controller sees them: plain calls, with Ray behind them.

A method named start_* returns at once; `wait` on the cluster gets its result. All others wait.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.lossless.draws import Draws
from cotrain.process import threads
from cotrain.process.cluster import Cluster, Placement, free_port
from cotrain.records import (
    GainReport,
    Rollout,
    RolloutBatch,
    RolloutRequest,
    ScoredRollout,
    SwapReport,
    Versions,
    WeightPayload,
)
from cotrain.roles.actors import EngineActor, PolicyActor
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.rollout.spec import EngineSpec
from cotrain.transport.payload import WeightUpdateRefused
from drafters.base import Sampler, Serving


class RolloutEngines:
    """All vLLM replicas; they serve the same versions."""

    def __init__(self, cluster: Cluster, config: RunConfig, specs: list[EngineSpec], placement: Placement):
        self._cluster = cluster
        environment = threads.engine_environment(cluster.engine_threads(), config.rollout.kv_cache_gib)
        self._actors = [
            cluster.start(
                EngineActor,
                spec,
                cluster.log_file(f"rollout_{i}"),
                environment=environment,
                gpus=placement.engine_gpus,
                max_concurrency=8,
            )
            for i, spec in enumerate(specs)
        ]
        self._started = [actor.start.remote() for actor in self._actors]

    def wait_until_started(self) -> list[dict[str, Any]]:
        """What each worker reports of itself."""
        return self._cluster.get(self._started)

    def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """One response to each request, in the order given. A prompt's samples go to one engine, for its cache."""
        prompts = list(dict.fromkeys(request.prompt_id for request in requests))
        engine_of = {prompt: i % len(self._actors) for i, prompt in enumerate(prompts)}
        shares = [[r for r in requests if engine_of[r.prompt_id] == i] for i in range(len(self._actors))]
        batches: list[RolloutBatch] = self._cluster.get(
            [
                actor.generate.remote(share, tap, **overrides)
                for actor, share in zip(self._actors, shares, strict=True)
                if share
            ]
        )
        return _merge(requests, batches)

    def update_policy(self, payload: WeightPayload, policy_version: int) -> SwapReport:
        """Serve new policy weights everywhere."""
        reports = self._cluster.get([a.update_policy.remote(payload, policy_version) for a in self._actors])
        return max(reports, key=lambda report: report.seconds)

    def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights on all engines, or on none. expected_rates: see RolloutEngine.update_drafter.

        All engines check the weights before one takes them. Raises WeightUpdateRefused; all go on with what they had.
        """
        if len(self._actors) > 1:
            self._cluster.get([a.check_drafter.remote(payload) for a in self._actors])
        updates = [a.update_drafter.remote(payload, drafter_version, expected_rates) for a in self._actors]
        reports, switched, refusal = [], [], None
        for actor, update in zip(self._actors, updates, strict=True):
            try:
                reports.append(self._cluster.get(update))
                switched.append(actor)
            except WeightUpdateRefused as error:
                refusal = error
        if refusal is not None:
            self._cluster.get([actor.undo_drafter_update.remote() for actor in switched])
            raise refusal
        return max(reports, key=lambda report: report.seconds)

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]:
        """Checksums of the named tensors as each engine serves them."""
        return self._cluster.get([a.served_digests.remote(names, draft) for a in self._actors])

    def time_draft_lengths(self, prompts: Sequence[list[int]]) -> int:
        """Time engine steps in all engines at once, as they will run; the number of timings of each.

        From then on each engine chooses its draft lengths. See RolloutEngine.time_draft_lengths.
        """
        return min(self._cluster.get([a.time_draft_lengths.remote(prompts) for a in self._actors]))

    def describe_speculation(self) -> str:
        """The draft lengths in use, and why."""
        words = self._cluster.get([a.describe_speculation.remote() for a in self._actors])
        if len(set(words)) == 1:
            return words[0]
        return "; ".join(f"engine {i}: {text}" for i, text in enumerate(words))

    def set_draft_tokens(self, draft_tokens: int | None) -> None:
        """Draft length from the next step on; 0 switches speculation off, None gives the choice back."""
        self._cluster.get([a.set_draft_tokens.remote(draft_tokens) for a in self._actors])

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._cluster.get([a.reset_prefix_cache.remote() for a in self._actors])

    def clear_drafter_cache(self) -> None:
        """Forget cached prefixes and the drafter's keys and values."""
        self._cluster.get([a.clear_drafter_cache.remote() for a in self._actors])


def _merge(requests: list[RolloutRequest], batches: list[RolloutBatch]) -> RolloutBatch:
    by_key = {(r.prompt_id, r.sample_index): r for batch in batches for r in batch.rollouts}
    gains = [batch.gain for batch in batches if batch.gain is not None]
    stats: dict[str, float] = {}
    for batch in batches:
        for name, value in batch.feature_stats.items():
            stats[name] = stats.get(name, 0) + value
    return RolloutBatch(
        rollouts=[by_key[request.prompt_id, request.sample_index] for request in requests],
        features=[shard for batch in batches for shard in batch.features],
        speculation=total_counts(batch.speculation for batch in batches),
        seconds=max(batch.seconds for batch in batches),
        num_generated_tokens=sum(batch.num_generated_tokens for batch in batches),
        feature_stats=stats,
        gain=sum(gains, start=GainReport()) if gains else None,
    )


class PolicyRanks:
    """The policy learner: one actor a rank."""

    def __init__(self, cluster: Cluster, config: RunConfig, model_path: Path, placement: Placement):
        self._cluster = cluster
        world, port = config.policy.num_processes, free_port()
        arguments = {
            "config": config.policy,
            "rollout": config.rollout,
            "model_path": str(model_path),
            "total_steps": config.steps,
            "seed": config.seed,
            "device": placement.device,
        }
        self._actors = [
            cluster.start(
                PolicyActor,
                cluster.log_file("policy" if world == 1 else f"policy_{rank}"),
                arguments,
                environment=threads.openmp_environment(cluster.learner_threads()) | _rank(rank, world, port),
                gpus=placement.learner_gpus,
            )
            for rank in range(world)
        ]
        self._started = [actor.start.remote() for actor in self._actors]

    def wait_until_started(self) -> None:
        """Raises what a rank raised while it loaded the policy."""
        self._cluster.get(self._started)

    def start_update(self, rollouts: list[ScoredRollout]) -> Any:
        """Begin one policy update on all ranks; rank 0's metrics come back."""
        return [actor.call.remote("update", rollouts) for actor in self._actors]

    def finish_update(self, update: Any) -> dict[str, float]:
        """Wait for `start_update`."""
        return self._cluster.get(update)[0]

    def write_payload(self, path: Path, dtype: str) -> WeightPayload:
        """The weights as the engines serve them."""
        return self._cluster.get(self._actors[0].write_payload.remote(str(path), dtype))

    def hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> Any:
        """(aux [T, A*H], final [T, H]) of the learner's own forward."""
        return self._cluster.get(self._actors[0].call.remote("hidden_states", token_ids, layers))

    def response_draws(self, rollouts: list[Rollout], sampler: Sampler, logit_tolerance: float) -> list[Draws]:
        """Response tokens of each rollout under the laws of the current weights; see PolicyLearner."""
        return self._cluster.get(self._actors[0].call.remote("response_draws", rollouts, sampler, logit_tolerance))

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random state."""
        self._cluster.get([actor.call.remote("save", str(folder)) for actor in self._actors])

    def load(self, folder: Path) -> None:
        """Continue from `save`."""
        self._cluster.get([actor.call.remote("load", str(folder)) for actor in self._actors])


def _rank(rank: int, world: int, port: int) -> dict[str, str]:
    if world == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def engine_specs(
    config: RunConfig,
    model_path: Path,
    drafter_folder: Path | None,
    serving: Serving | None,
    scratch: Path,
    versions: Versions,
    first_step: int,
) -> list[EngineSpec]:
    """One spec a replica. first_step: steps made before; a resumed engine must not draw the first steps' noise again."""
    first = EngineSpec(
        rollout=config.rollout,
        model_path=str(model_path),
        drafter_folder=None if drafter_folder is None else str(drafter_folder),
        serving=serving,
        seed=0,
        scratch="",
        versions=versions,
    )
    return [
        replace(first, seed=engine_seed(config.seed, i, first_step), scratch=str(scratch / f"rollout_{i}"))
        for i in range(config.rollout.num_engines)
    ]


def engine_seed(seed: int, engine: int, first_step: int) -> int:
    """A seed of its own for every engine of every run, and for every step that a run is resumed after.

    A run that is resumed after the same step twice repeats nothing that it keeps: what the first attempt made after
    that step is discarded.
    """
    key = f"engine/{seed}/{engine}/{first_step}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1
