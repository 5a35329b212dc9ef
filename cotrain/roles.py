"""The three roles as the controller sees them: plain calls, with Ray behind them.

A method named start_* returns at once; `wait` on the cluster gets its result. All others wait.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cotrain import threads
from cotrain.actors import DrafterActor, EngineActor, PolicyActor
from cotrain.cluster import Cluster, Placement, free_port
from cotrain.config import RunConfig
from cotrain.records import (
    FeatureShard,
    RolloutBatch,
    RolloutRequest,
    ScoredRollout,
    SwapReport,
    Versions,
    WeightPayload,
)
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.rollout.engine import EngineSpec


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

    def update_drafter(self, payload: WeightPayload, drafter_version: int) -> SwapReport:
        """Serve new drafter weights everywhere."""
        reports = self._cluster.get([a.update_drafter.remote(payload, drafter_version) for a in self._actors])
        return max(reports, key=lambda report: report.seconds)

    def set_draft_tokens(self, draft_tokens: int) -> None:
        """Draft length from the next step on; 0 switches speculation off."""
        self._cluster.get([a.set_draft_tokens.remote(draft_tokens) for a in self._actors])

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._cluster.get([a.reset_prefix_cache.remote() for a in self._actors])

    def shutdown(self) -> None:
        """Stop vLLM in every engine."""
        self._cluster.get([a.shutdown.remote() for a in self._actors], timeout=30)


def _merge(requests: list[RolloutRequest], batches: list[RolloutBatch]) -> RolloutBatch:
    by_key = {(r.prompt_id, r.sample_index): r for batch in batches for r in batch.rollouts}
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

    def policy_version(self) -> int:
        """Updates made so far."""
        return self._cluster.get(self._actors[0].policy_version.remote())

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


class DrafterTraining:
    """The drafter trainer."""

    def __init__(
        self, cluster: Cluster, config: RunConfig, model_path: Path, init_folder: Path | None, placement: Placement
    ):
        self._cluster = cluster
        arguments = {
            "config": config.drafter,
            "rollout": config.rollout,
            "model_path": str(model_path),
            "init_folder": None if init_folder is None else str(init_folder),
            "total_steps": config.steps,
            "seed": config.seed,
            "device": placement.device,
        }
        self._actor = cluster.start(
            DrafterActor,
            cluster.log_file("drafter"),
            arguments,
            environment=threads.openmp_environment(cluster.learner_threads()),
            gpus=placement.drafter_gpus,
        )
        cluster.get(self._actor.start.remote())

    def aux_layers(self) -> tuple[int, ...]:
        """Target layers the drafter reads."""
        return self._cluster.get(self._actor.aux_layers.remote())

    def start_learning(self, shards: list[FeatureShard], step: int, train: bool) -> Any:
        """Begin to take in a step's features and train on the buffer."""
        return self._actor.learn.remote(shards, step, train)

    def finish_learning(self, learning: Any) -> dict[str, float]:
        """Wait for `start_learning`."""
        return self._cluster.get(learning)

    def set_target_weights(self, payload: WeightPayload, policy_version: int) -> None:
        """Hand over the head and embedding of a policy version."""
        self._cluster.get(self._actor.call.remote("set_target_weights", payload.path, policy_version))

    def publish(self, path: Path, dtype: str) -> tuple[WeightPayload, int]:
        """Freeze the current weights as the next version and write them for the engines."""
        version = self._cluster.get(self._actor.call.remote("publish"))
        return self._cluster.get(self._actor.write_payload.remote(str(path), dtype)), version

    def save_checkpoint(self, folder: Path, dtype: str) -> None:
        """Write the folder that vLLM serves."""
        self._cluster.get(self._actor.save_checkpoint.remote(str(folder), dtype))

    def drafter_version(self) -> int:
        """Publications so far."""
        return self._cluster.get(self._actor.drafter_version.remote())

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, buffer and random state."""
        self._cluster.get(self._actor.call.remote("save", str(folder)))

    def load(self, folder: Path) -> None:
        """Continue from `save`."""
        self._cluster.get(self._actor.call.remote("load", str(folder)))


def engine_specs(
    config: RunConfig,
    model_path: Path,
    drafter_folder: Path | None,
    aux_layers: tuple[int, ...],
    scratch: Path,
    versions: Versions,
) -> list[EngineSpec]:
    """One spec a replica. Seeds differ, or replicas would draw the same samples."""
    first = EngineSpec(
        rollout=config.rollout,
        model_path=str(model_path),
        drafter_folder=None if drafter_folder is None else str(drafter_folder),
        aux_layers=aux_layers,
        seed=config.seed,
        scratch="",
        versions=versions,
    )
    return [
        replace(first, seed=config.seed + i, scratch=str(scratch / f"rollout_{i}"))
        for i in range(config.rollout.num_engines)
    ]
