"""The loop of a run. One synchronous step:

    prompts --> rollout engines --rollouts--> reward, advantages --> policy learner --+
                  |   ^   ^                                                           |
        features  |   |   +------------- policy weights (policy_version + 1) <--------+
                  v   |
        drafter trainer (while the policy learns)
                      |
                      +-- drafter weights (drafter_version + 1), if they pass the gate

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

from cotrain.config.schema import RunConfig
from cotrain.lossless.monitor import LosslessMonitor
from cotrain.policy.advantages import group_advantages
from cotrain.publish.alarms import Alarm
from cotrain.publish.loop import DrafterLoop
from cotrain.records import RolloutBatch, RolloutRequest, ScoredRollout, SwapReport, Versions
from cotrain.roles.drafter import DrafterTraining
from cotrain.roles.engines import PolicyRanks, RolloutEngines
from cotrain.run.checkpoint import RunState, new_checkpoint
from cotrain.run.console import Console
from cotrain.run.decisions import DecisionLog, DrafterEvent
from cotrain.run.metrics import MetricsWriter, speculation_metrics
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from cotrain.tasks.base import Task
from cotrain.tasks.prompt_order import PromptSampler
from cotrain.tasks.prompts import PromptEncoder
from cotrain.tasks.samples import write_samples
from cotrain.trainer.self_check import check_features, check_log_probs, check_records
from drafters.base import Sampler


@dataclass
class Roles:
    """Who takes part. `drafter` and its loop are None without speculation; a frozen drafter's trainer only scores it."""

    engines: RolloutEngines
    policy: PolicyRanks
    drafter: DrafterTraining | None
    drafting: DrafterLoop | None


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
        decisions: DecisionLog,
        console: Console,
        scratch: Path,
        versions: Versions,
        fingerprints: dict[str, str],
        step: int = 0,
    ):
        self.config, self.run_dir, self.roles = config, run_dir, roles
        self.task, self.prompts, self.sampler = task, prompts, sampler
        self.tracker, self.metrics, self.decisions, self.console = tracker, metrics, decisions, console
        self.scratch, self.versions, self.fingerprints = scratch, versions, fingerprints
        self.step = step
        self.stop_requested: Callable[[], bool] = lambda: False
        self.last_batch: RolloutBatch | None = None
        rollout = config.rollout
        self._sampler = Sampler(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
        self.monitor = LosslessMonitor(config.lossless, self._sampler, rollout.dtype, config.seed)
        self.run_seconds = 0.0
        """Of all steps, those before a resume included."""
        self._self_checked = False
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

    @property
    def mode(self) -> str | None:
        """What every step line says while alarms have switched speculation off."""
        return None if self.roles.drafting is None else self.roles.drafting.mode

    def load_state(self, state: RunState) -> None:
        """Continue what `_save` has written, beside what the roles load themselves."""
        self.run_seconds = state.seconds
        if state.lossless is not None:
            self.monitor.load_state(state.lossless)
        if state.drafting is not None and self.roles.drafting is not None:
            self.roles.drafting.load_state(state.drafting)

    def _one_step(self, step: int) -> None:
        self._seconds = {}
        started = time.perf_counter()
        drafting = self.roles.drafting
        if drafting is not None:
            drafting.begin()
        speculates = drafting is not None and self.mode is None
        with self._timed("generate"):
            batch = self.roles.engines.generate(self._requests(step), tap=speculates)
        first, self._self_checked = not self._self_checked, True
        if first and speculates:
            self._check_batch(batch)
        with self._timed("reward"):
            rollouts = self._score(batch)
        served = self.versions
        try:
            lossless_metrics = self._watch(step, batch) if speculates else {}
            policy_metrics = self._learn(step, rollouts, batch)
            if first:
                self._check_log_probs(policy_metrics)
            with self._timed("swap_policy"):
                policy_swap = self._swap_policy() if self.config.policy.train else None
            with self._timed("swap_drafter"):
                drafter_swap = self._swap_drafter(step)
        finally:  # an alarm that ends the run is an event too
            self._record_events(drafting.events if drafting is not None else [])
        self.last_batch = batch
        row = _rollout_metrics(batch, rollouts, self.config) | policy_metrics | lossless_metrics
        row |= drafting.metrics if drafting is not None else {}
        row |= _swap_metrics("policy", policy_swap) | _swap_metrics("drafter", drafter_swap)
        row |= {"versions/policy": served.policy, "versions/drafter": served.drafter}
        row |= {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        row["time/step_s"] = time.perf_counter() - started
        self.run_seconds += row["time/step_s"]
        self._report(step, row, rollouts, served)

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

    def _check_batch(self, batch: RolloutBatch) -> None:
        with self._timed("self_check"):
            error = check_features(batch, self.roles.policy, self.config.rollout.dtype)
            check_records(batch, None if self.config.rollout.ignore_eos else self.prompts.eos_token_id)
        self.console.say(f"tapped hidden states are the policy's own (relative error {error:.1g})")

    def _check_log_probs(self, policy_metrics: dict[str, float]) -> None:
        rollout, gap = self.config.rollout, policy_metrics.get("policy/rollout_log_prob_gap")
        if gap is not None and rollout.top_p == 1 and rollout.top_k == 0:
            check_log_probs(gap, rollout.dtype)

    def _watch(self, step: int, batch: RolloutBatch) -> dict[str, float]:
        """Now and then: have these rollouts the policy's distribution? Before the policy moves on."""
        drafting, monitor = self.roles.drafting, self.monitor
        if drafting is None or not monitor.due(step, self.run_seconds):
            return {}
        chosen = monitor.choose(batch.rollouts)
        if chosen is None:
            return {}
        started = time.perf_counter()
        with self._timed("lossless"):
            draws = self.roles.policy.response_draws(chosen.rollouts, self._sampler, monitor.logit_tolerance)
            look = monitor.look(step, chosen, draws, time.perf_counter() - started)
        if not look.passed:
            cause = "speculation is not lossless on this engine, or the engines serve other policy weights"
            remedy = "find out with cotrain verify; drafter=none runs without speculation"
            drafting.respond(step, [Alarm("not_lossless", look.message(), cause, remedy, look.metrics())])
        return look.metrics()

    def _learn(self, step: int, rollouts: list[ScoredRollout], batch: RolloutBatch) -> dict[str, float]:
        """Policy update, with the drafter trainer at work beside it."""
        drafting = self.roles.drafting
        with self._timed("learn"):
            update = self.roles.policy.start_update(rollouts) if self.config.policy.train else None
            training = None
            if drafting is not None:
                drafting.look(step, batch, self.versions)
                training = drafting.start_training(step)
            policy_metrics = self.roles.policy.finish_update(update) if update is not None else {}
            if drafting is not None:
                drafting.finish_training(training)
        return policy_metrics

    def _swap_policy(self) -> SwapReport:
        version = self.versions.policy + 1
        payload = self.roles.policy.write_payload(self.scratch / "policy.safetensors", self.config.rollout.dtype)
        report = self.roles.engines.update_policy(payload, version)
        if self.roles.drafter is not None:
            self.roles.drafter.set_target_weights(payload, version)
        self.versions = Versions(version, self.versions.drafter)
        return report

    def _swap_drafter(self, step: int) -> SwapReport | None:
        drafter, drafting, config = self.roles.drafter, self.roles.drafting, self.config.drafter
        if drafter is None or drafting is None or config is None:
            return None
        report = drafting.swap(step)
        if report is None:
            return None
        version = drafting.serving
        folder = self.run_dir.drafter(version)
        drafter.save_checkpoint(folder, self.config.rollout.dtype, version)
        self.versions = Versions(self.versions.policy, version)
        tags = {"init": config.init or "random", "data_fingerprint": f"{self.config.name}:rollouts to step {step - 1}"}
        tags["decision"] = drafting.events[-1].reason
        self.tracker.log_drafter(folder, self.versions, step, _promised(drafting), tags)
        return report

    def _record_events(self, events: list[DrafterEvent]) -> None:
        for event in events:
            self.decisions.write(event)
        if events:
            self.tracker.log_decisions(self.decisions.path, events[-1])

    def _report(self, step: int, row: dict[str, float], rollouts: list[ScoredRollout], served: Versions) -> None:
        self.metrics.write(step, row)
        self.tracker.log_step(step, row)
        if served.drafter > 0 and "rollout/acceptance_length" in row:
            self.tracker.log_served(served.drafter, row, step)
        write_samples(self.run_dir.samples_file(step), rollouts, self.prompts, self.config.checkpoint.samples_per_step)
        drafting = self.roles.drafting
        events = drafting.events if drafting is not None else []
        notes = [*(event.in_short() for event in events), self.mode or ""]
        self.console.step(
            step, self.config.steps, row, self.versions, self.tracker.missing_steps, [*filter(None, notes)]
        )
        for event in events:
            if event.is_bad_news:
                self.console.say(f"  {event.kind}: {event.reason}")

    def _save(self) -> None:
        state = RunState(
            step=self.step,
            versions=self.versions,
            task_position=self.sampler.state(),
            config=self.config.model_dump(mode="json"),
            fingerprints=self.fingerprints,
            tracking_run_id=self.tracker.run_id,
            seconds=self.run_seconds,
            lossless=self.monitor.state(),
            drafting=None if self.roles.drafting is None else self.roles.drafting.state(),
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
    metrics |= {} if batch.gain is None else batch.gain.metrics()
    if stats := batch.feature_stats:
        tapped = stats["num_tokens"] or 1
        metrics |= {
            "rollout/tapped_rollouts": stats["num_rollouts"],
            "rollout/feature_holes": stats["num_holes"] / tapped,
            "rollout/tap_overhead": stats["record_seconds"] / batch.seconds,
            "rollout/feature_bytes_per_token": sum(shard.num_bytes for shard in batch.features) / tapped,
        }
    return metrics


def _swap_metrics(role: str, swap: SwapReport | None) -> dict[str, float]:
    if swap is None:
        return {}
    return {f"{role}/swap_s": swap.seconds, f"{role}/swap_bytes": swap.num_bytes}


def _promised(drafting: DrafterLoop) -> dict[str, float]:
    """What the gate expects of the drafter just published."""
    if drafting.promise is None:
        return {}
    rates = {f"drafter/acceptance_rate_pos_{k}": rate for k, rate in enumerate(drafting.promise.rates[-1], start=1)}
    return {"drafter/expected_acceptance_length": drafting.promise.longest.value} | rates
