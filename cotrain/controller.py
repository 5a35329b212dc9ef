"""The loop of a run. One synchronous step:

    prompts --> rollout engines --rollouts--> reward, advantages --> policy learner --+
                  |   ^   ^                                                           |
        features  |   |   +------------- policy weights (policy_version + 1) <--------+
                  v   |
        drafter trainer (while the policy learns)
                      |
                      +-- drafter weights (drafter_version + 1)

    then: metrics, step line, checkpoint.

Every rollout carries the two versions it was made with. Rollouts are always of one policy version, because weights
change only between steps here; the engine itself could take them at any time.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.checkpoint import RunState, new_checkpoint
from cotrain.config import RunConfig
from cotrain.console import Console
from cotrain.drafting.schedule import should_publish, should_train
from cotrain.metrics import MetricsWriter, speculation_metrics
from cotrain.policy.advantages import group_advantages
from cotrain.prompts import PromptEncoder
from cotrain.records import RolloutBatch, RolloutRequest, ScoredRollout, SwapReport, Versions
from cotrain.roles import DrafterTraining, PolicyRanks, RolloutEngines
from cotrain.run_dir import RunDir
from cotrain.samples import write_samples
from cotrain.self_check import check_features
from cotrain.tasks.base import Task
from cotrain.tasks.sampling import PromptSampler
from cotrain.tracking import Tracker


@dataclass
class Roles:
    """Who takes part. `drafter` is None without speculation; a frozen drafter has no trainer either."""

    engines: RolloutEngines
    policy: PolicyRanks
    drafter: DrafterTraining | None


class Controller:
    """Drives the roles through the steps of a run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        roles: Roles,
        task: Task,
        prompts: PromptEncoder,
        sampler: PromptSampler,
        tracker: Tracker,
        metrics: MetricsWriter,
        console: Console,
        scratch: Path,
        versions: Versions,
        fingerprints: dict[str, str],
        step: int = 0,
    ):
        self.config, self.run_dir, self.roles = config, run_dir, roles
        self.task, self.prompts, self.sampler = task, prompts, sampler
        self.tracker, self.metrics, self.console = tracker, metrics, console
        self.scratch, self.versions, self.fingerprints = scratch, versions, fingerprints
        self.step = step
        self.stop_requested: Callable[[], bool] = lambda: False
        self.last_batch: RolloutBatch | None = None
        self._checked_features = False
        self._seconds: dict[str, float] = {}

    def run(self) -> bool:
        """All remaining steps. Returns False when it was asked to stop early; the run is saved either way."""
        while self.step < self.config.steps and not self.stop_requested():
            self._one_step(self.step + 1)
            self.step += 1
            last = self.step == self.config.steps or self.stop_requested()
            if last or self.step % self.config.checkpoint.every == 0:
                self._save()
        return self.step == self.config.steps

    def _one_step(self, step: int) -> None:
        self._seconds = {}
        started = time.perf_counter()
        with self._timed("generate"):
            batch = self.roles.engines.generate(self._requests(step))
        if not self._checked_features and self.roles.drafter is not None:
            with self._timed("self_check"):
                error = check_features(batch, self.roles.policy, self.config.rollout.dtype)
            self._checked_features = True
            self.console.say(f"tapped hidden states are the policy's own (relative error {error:.1g})")
        with self._timed("reward"):
            rollouts = self._score(batch)
        served = self.versions
        policy_metrics, drafter_metrics = self._learn(step, rollouts, batch)
        with self._timed("swap_policy"):
            policy_swap = self._swap_policy() if self.config.policy.train else None
        with self._timed("swap_drafter"):
            drafter_swap = self._swap_drafter(step, drafter_metrics)
        self.last_batch = batch
        row = _rollout_metrics(batch, rollouts, self.config) | policy_metrics | drafter_metrics
        row |= _swap_metrics("policy", policy_swap) | _swap_metrics("drafter", drafter_swap)
        row["drafter/published"] = float(drafter_swap is not None)
        row |= {"versions/policy": served.policy, "versions/drafter": served.drafter}
        row |= {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        row["time/step_s"] = time.perf_counter() - started
        self._report(step, row, rollouts, served, drafter_swap is not None)

    def _requests(self, step: int) -> list[RolloutRequest]:
        seeded = self.config.rollout.draft_sample_method == "greedy"
        requests = []
        self.prompts.forget_all()
        for index in self.sampler.next():
            prompt = self.task.prompt(index)
            token_ids = self.prompts.encode(prompt)
            self.prompts.remember(prompt)
            for sample in range(self.config.rollout.samples_per_prompt):
                seed = request_seed(self.config.seed, step, prompt.id, sample) if seeded else None
                requests.append(RolloutRequest(prompt.id, sample, token_ids, seed))
        return requests

    def _score(self, batch: RolloutBatch) -> list[ScoredRollout]:
        rewards = [self.task.score(self.prompts.prompt(r.prompt_id), r.text) for r in batch.rollouts]
        prompt_ids = [r.prompt_id for r in batch.rollouts]
        advantages = group_advantages(prompt_ids, rewards, self.config.policy.advantage)
        return [ScoredRollout(*fields) for fields in zip(batch.rollouts, rewards, advantages, strict=True)]

    def _learn(
        self, step: int, rollouts: list[ScoredRollout], batch: RolloutBatch
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Policy update, with the drafter trainer at work beside it."""
        drafter = self.roles.drafter
        with self._timed("learn"):
            update = self.roles.policy.start_update(rollouts) if self.config.policy.train else None
            learning = None
            if drafter is not None:
                assert self.config.drafter is not None
                learning = drafter.start_learning(batch.features, step, should_train(self.config.drafter, step))
            policy_metrics = self.roles.policy.finish_update(update) if update is not None else {}
            drafter_metrics = {} if drafter is None else drafter.finish_learning(learning)
        return policy_metrics, drafter_metrics

    def _swap_policy(self) -> SwapReport:
        version = self.versions.policy + 1
        payload = self.roles.policy.write_payload(self.scratch / "policy.safetensors", self.config.rollout.dtype)
        report = self.roles.engines.update_policy(payload, version)
        if self.roles.drafter is not None:
            self.roles.drafter.set_target_weights(payload, version)
        self.versions = Versions(version, self.versions.drafter)
        return report

    def _swap_drafter(self, step: int, drafter_metrics: dict[str, float]) -> SwapReport | None:
        drafter, config = self.roles.drafter, self.config.drafter
        if drafter is None or config is None or not should_publish(config, step):
            return None
        payload, version = drafter.publish(self.scratch / "drafter.safetensors", self.config.rollout.dtype)
        report = self.roles.engines.update_drafter(payload, version)
        folder = self.run_dir.drafter(version)
        drafter.save_checkpoint(folder, self.config.rollout.dtype)
        self.versions = Versions(self.versions.policy, version)
        self.tracker.log_drafter(
            folder,
            self.versions,
            step,
            {k: v for k, v in drafter_metrics.items() if "acceptance" in k or k == "drafter/loss"},
            {
                "init": config.init or "random",
                "data_fingerprint": f"{self.config.name}:rollouts to step {step}",
            },
        )
        return report

    def _report(
        self, step: int, row: dict[str, float], rollouts: list[ScoredRollout], served: Versions, published: bool
    ) -> None:
        self.metrics.write(step, row)
        self.tracker.log_step(step, row)
        if served.drafter > 0 and "rollout/acceptance_length" in row:
            self.tracker.log_served(served.drafter, row["rollout/acceptance_length"], step)
        write_samples(self.run_dir.samples_file(step), rollouts, self.prompts, self.config.checkpoint.samples_per_step)
        self.console.step(step, self.config.steps, row, self.versions, self.tracker.missing_steps)

    def _save(self) -> None:
        state = RunState(
            step=self.step,
            versions=self.versions,
            task_position=self.sampler.state(),
            config=self.config.model_dump(mode="json"),
            fingerprints=self.fingerprints,
            tracking_run_id=self.tracker.run_id,
        )
        with new_checkpoint(self.run_dir, state, self.config.checkpoint.keep_last) as folder:
            self.roles.policy.save(folder / "policy")
            if self.roles.drafter is not None:
                self.roles.drafter.save(folder / "drafter")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.console.phase(name.replace("_", " "), terminal_only=True):
            yield
        self._seconds[name] = time.perf_counter() - started


def request_seed(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """A sampling seed of its own for every sample of a run."""
    key = f"{seed}/{step}/{prompt_id}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def _rollout_metrics(batch: RolloutBatch, rollouts: list[ScoredRollout], config: RunConfig) -> dict[str, float]:
    n = len(rollouts)
    metrics: dict[str, Any] = {
        "policy/reward": sum(r.reward for r in rollouts) / n,
        "policy/groups_with_signal": len({r.rollout.prompt_id for r in rollouts if r.advantage}) * 1.0,
        "rollout/response_length": batch.num_generated_tokens / n,
        "rollout/generated_tokens": batch.num_generated_tokens,
        "rollout/truncated": sum(r.rollout.finish_reason == "length" for r in rollouts) / n,
        "rollout/tokens_per_s": batch.num_generated_tokens / batch.seconds,
    }
    metrics |= speculation_metrics(batch.speculation, config.rollout.draft_tokens)
    if stats := batch.feature_stats:
        tapped = stats["num_tokens"] or 1
        metrics |= {
            "rollout/tapped_rollouts": stats["num_rollouts"],
            "rollout/feature_holes": stats["num_holes"] / tapped,
            "rollout/tap_overhead": stats["record_seconds"] / batch.seconds,
        }
    return metrics


def _swap_metrics(role: str, swap: SwapReport | None) -> dict[str, float]:
    if swap is None:
        return {}
    return {f"{role}/swap_s": swap.seconds, f"{role}/swap_bytes": swap.num_bytes}
