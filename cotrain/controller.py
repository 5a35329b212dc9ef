"""The loop of a run. One synchronous step:

    prompts --> rollout engines --rollouts--> reward, advantages --> policy learner --+
                  |   ^   ^                                                           |
        features  |   |   +------------- policy weights (policy_version + 1) <--------+
                  v   |
        drafter trainer (while the policy learns)
                      |
                      +-- drafter weights (drafter_version + 1), if they pass the gate

    then: metrics, step line, checkpoint.

Every rollout carries the two versions it was made with. Rollouts are always of one policy version, because the engines
are idle here while weights change; they could take them at any time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.lossless.monitor import LosslessMonitor
from cotrain.policy.advantages import group_advantages
from cotrain.publish.alarms import Alarm
from cotrain.publish.decision import Outcome
from cotrain.records import RolloutBatch, RolloutRequest, ScoredRollout, SwapReport, Versions
from cotrain.roles.engines import RolloutEngines, derived_seed
from cotrain.roles.learners import Learner
from cotrain.roles.publisher import Publisher
from cotrain.run.checkpoint import RunState, new_checkpoint
from cotrain.run.console import Console
from cotrain.run.decisions import DrafterEvent
from cotrain.run.metrics import speculation_metrics
from cotrain.run.rows import RowFile
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from cotrain.tasks.base import Task
from cotrain.tasks.prompts import PromptEncoder, PromptOrder, write_samples
from cotrain.trainer.self_check import check_features, check_log_probs, check_records
from drafters.base import SamplingParams


@dataclass
class Roles:
    """Who takes part, and the folder in shared memory through which weights are sent.

    `drafter` and `publisher` are None without speculation; the trainer of a frozen drafter only scores it.
    """

    engines: RolloutEngines
    policy: Learner
    drafter: Learner | None
    publisher: Publisher | None
    scratch: Path


@dataclass
class Prompts:
    """The task, the order in which its prompts are drawn, and their encoding."""

    task: Task
    order: PromptOrder
    encoder: PromptEncoder


@dataclass
class Records:
    """Where a run writes what it does."""

    metrics: RowFile
    decisions: RowFile
    tracker: Tracker
    console: Console


class Controller:
    """Drives the roles through the steps of a run."""

    def __init__(
        self, config: RunConfig, run_dir: RunDir, roles: Roles, prompts: Prompts, records: Records, state: RunState
    ):
        """state: where the run stands; the roles are there already."""
        self.config, self.run_dir, self.roles, self.prompts, self.records = config, run_dir, roles, prompts, records
        self.step, self.versions, self._first_state = state.step, state.versions, state
        self.run_seconds = state.seconds
        """Seconds of all steps, those before a resume included."""
        self.stop_requested: Callable[[], bool] = lambda: False
        self.last_batch: RolloutBatch | None = None
        rollout = config.rollout
        self._sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
        self.monitor = LosslessMonitor(config.lossless, self._sampling, rollout.dtype, config.seed)
        if state.lossless is not None:
            self.monitor.load_state(state.lossless)
        if state.drafting is not None and roles.publisher is not None:
            roles.publisher.load_state(state.drafting)
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
        return None if self.roles.publisher is None else self.roles.publisher.mode

    def _one_step(self, step: int) -> None:
        self._seconds = {}
        started = time.perf_counter()
        served = self.versions
        speculates = self.roles.publisher is not None and self.mode is None
        with self._timed("generate"):
            batch = self.roles.engines.generate(self._requests(step), tap=speculates)
        is_first = step == self._first_state.step + 1
        if is_first and speculates:
            self._check_batch(batch)
        with self._timed("reward"):
            rollouts = self._score(batch)
        row = _rollout_metrics(batch, rollouts)
        alarms = self._check_distribution(step, batch, row) if speculates else []
        with self._timed("learn"):
            outcome = self._learn(step, rollouts, batch, alarms, row)
        if is_first:
            self._check_log_probs(row)
        if self.config.policy.train:
            with self._timed("swap_policy"):
                self._swap_policy(row)
        if outcome is not None and outcome.swap is not None:
            row |= _swap_metrics("drafter", outcome.swap)
            self._keep_drafter(step, outcome)
        self.last_batch = batch
        row |= {"versions/policy": served.policy, "versions/drafter": served.drafter}
        row |= {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        row["time/step_s"] = time.perf_counter() - started
        self.run_seconds += row["time/step_s"]
        self._report(step, row, rollouts, outcome.events if outcome is not None else [])

    def _requests(self, step: int) -> list[RolloutRequest]:
        seeded = self.config.rollout.draft_sample_method == "greedy"
        requests, encoder = [], self.prompts.encoder
        encoder.in_flight.clear()
        for index in self.prompts.order.step(step):
            prompt = self.prompts.task.prompt(index)
            token_ids = encoder.encode(prompt)
            encoder.in_flight[prompt.id] = prompt
            for sample in range(self.config.rollout.samples_per_prompt):
                seed = derived_seed(self.config.seed, step, prompt.id, sample) if seeded else None
                requests.append(RolloutRequest(prompt.id, sample, token_ids, seed))
        return requests

    def _score(self, batch: RolloutBatch) -> list[ScoredRollout]:
        task, encoder = self.prompts.task, self.prompts.encoder
        rewards = [task.score(encoder.in_flight[r.prompt_id], r.text) for r in batch.rollouts]
        prompt_ids = [r.prompt_id for r in batch.rollouts]
        advantages = group_advantages(prompt_ids, rewards, self.config.policy.advantage)
        return [ScoredRollout(*fields) for fields in zip(batch.rollouts, rewards, advantages, strict=True)]

    def _check_batch(self, batch: RolloutBatch) -> None:
        rollout = self.config.rollout
        with self._timed("self_check"):
            error = check_features(batch, partial(self.roles.policy.call_first, "hidden_states"), rollout.dtype)
            check_records(batch, None if rollout.ignore_eos else self.prompts.encoder.tokenizer.eos_token_id)
        self.records.console.say(f"tapped hidden states are the policy's own (relative error {error:.1g})")

    def _check_log_probs(self, row: dict[str, float]) -> None:
        rollout, gap = self.config.rollout, row.get("policy/rollout_log_prob_gap")
        if gap is not None and rollout.top_p == 1 and rollout.top_k == 0:
            check_log_probs(gap, rollout.dtype)

    def _check_distribution(self, step: int, batch: RolloutBatch, row: dict[str, float]) -> list[Alarm]:
        """Check, when it is due, that the rollouts have the distribution of the policy that generated them."""
        monitor, started = self.monitor, time.perf_counter()
        chosen = monitor.choose(batch.rollouts) if monitor.due(step, self.run_seconds) else None
        if chosen is None:
            return []
        arguments = chosen.rollouts, self._sampling, monitor.logit_tolerance
        with self._timed("lossless"):
            draws = self.roles.policy.call_first("response_draws", *arguments)
            verdict, metrics = monitor.check(step, chosen, draws, time.perf_counter() - started)
        row |= metrics
        if verdict.passed:
            return []
        what = f"rollouts do not have the policy's distribution: {verdict}"
        cause = "speculation is not lossless on this engine, or the engines serve other policy weights"
        remedy = "find out with cotrain verify; drafter=none runs without speculation"
        return [Alarm("not_lossless", what, cause, remedy, metrics)]

    def _learn(
        self, step: int, rollouts: list[ScoredRollout], batch: RolloutBatch, alarms: list[Alarm], row: dict[str, float]
    ) -> Outcome | None:
        """Policy update; beside it the drafters are scored, one is swapped in or not, and the drafter is trained.

        Raises DrafterAlarm. An alarm that ends the run is recorded before.
        """
        policy, drafter, publisher = self.roles.policy, self.roles.drafter, self.roles.publisher
        update = policy.begin("update", rollouts) if self.config.policy.train else None
        outcome = training = None
        if drafter is not None and publisher is not None and self.mode is None:
            outcome = publisher.evaluate(step, batch, self.versions, alarms)
            row |= outcome.metrics
            self._record_events(outcome.events)
            if outcome.failure is not None:
                raise outcome.failure
            training = drafter.begin("train", step) if outcome.trains else None
        if update is not None:
            row |= policy.finish(update)
        if drafter is not None and training is not None:
            row |= drafter.finish(training)
        return outcome

    def _swap_policy(self, row: dict[str, float]) -> None:
        version = self.versions.policy + 1
        payload = self.roles.policy.call_first("write_payload", self.roles.scratch / "policy.safetensors")
        row |= _swap_metrics("policy", self.roles.engines.update_policy(payload, version))
        if self.roles.drafter is not None:
            self.roles.drafter.call("set_target_weights", payload.path, version)
        self.versions = Versions(version, self.versions.drafter)

    def _keep_drafter(self, step: int, outcome: Outcome) -> None:
        """The drafter that was put into the engines goes into the run's folder and the registry."""
        drafter, config, event = self.roles.drafter, self.config.drafter, outcome.events[-1]
        assert drafter is not None and config is not None
        folder = self.run_dir.drafter(event.version)
        drafter.call("save_checkpoint", folder, event.version)
        self.versions = Versions(self.versions.policy, event.version)
        metrics = {}
        if (expected := outcome.expected) is not None:
            metrics = {f"drafter/acceptance_rate_pos_{k}": rate for k, rate in enumerate(expected.rates[-1], start=1)}
            metrics["drafter/expected_acceptance_length"] = expected.longest
        tags = {
            "init": config.init or "random",
            "data_fingerprint": f"{self.config.name}:rollouts to step {step - 1}",
            "decision": event.reason,
        }
        self.records.tracker.log_drafter(folder, self.versions, step, metrics, tags)

    def _record_events(self, events: Sequence[DrafterEvent]) -> None:
        decisions = self.records.decisions
        for event in events:
            decisions.write(event.step, asdict(event))
        if events:
            self.records.tracker.log_decisions(decisions.path, events[-1])

    def _report(
        self, step: int, row: dict[str, float], rollouts: list[ScoredRollout], events: Sequence[DrafterEvent]
    ) -> None:
        tracker, console = self.records.tracker, self.records.console
        self.records.metrics.write(step, row)
        tracker.log_step(step, row)
        write_samples(self.run_dir.samples_file(step), rollouts, self.prompts.encoder)
        notes = [event.in_short() for event in events] + [self.mode or ""]
        console.step(step, self.config.steps, row, self.versions, tracker.missing_steps, [*filter(None, notes)])
        for event in events:
            if event.is_bad_news:
                console.say(f"  {event.kind}: {event.reason}")

    def _save(self) -> None:
        publisher, drafter = self.roles.publisher, self.roles.drafter
        state = replace(
            self._first_state,
            step=self.step,
            versions=self.versions,
            config=self.config.model_dump(mode="json"),
            tracking_run_id=self.records.tracker.run_id,
            seconds=self.run_seconds,
            lossless=self.monitor.state(),
            drafting=None if publisher is None else publisher.state(),
        )
        with new_checkpoint(self.run_dir, state, self.config.checkpoint.keep_last) as folder:
            self.roles.policy.call("save", folder / "policy")
            if drafter is not None:
                drafter.call("save", folder / "drafter")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.records.console.phase(name.replace("_", " "), terminal_only=True):
            yield
        self._seconds[name] = time.perf_counter() - started


def _rollout_metrics(batch: RolloutBatch, rollouts: list[ScoredRollout]) -> dict[str, float]:
    n = len(rollouts)
    metrics: dict[str, Any] = {
        "policy/reward": sum(r.reward for r in rollouts) / n,
        "policy/groups_with_signal": len({r.rollout.prompt_id for r in rollouts if r.advantage}) * 1.0,
        "rollout/response_length": batch.num_generated_tokens / n,
        "rollout/generated_tokens": batch.num_generated_tokens,
        "rollout/truncated": sum(r.rollout.finish_reason == "length" for r in rollouts) / n,
        "rollout/tokens_per_s": batch.num_generated_tokens / batch.seconds,
    }
    metrics |= speculation_metrics(batch.speculation)
    metrics |= {} if batch.gain is None else batch.gain.metrics()
    if stats := batch.feature_stats:
        tapped = stats["num_tokens"] or 1
        metrics |= {
            "rollout/tapped_rollouts": stats["num_rollouts"],
            "rollout/feature_holes": stats["num_holes"] / tapped,
            "rollout/tap_overhead": stats["record_seconds"] / batch.seconds,
            "rollout/feature_bytes_per_token": sum(Path(path).stat().st_size for path in batch.features) / tapped,
        }
    return metrics


def _swap_metrics(role: str, swap: SwapReport) -> dict[str, float]:
    return {f"{role}/swap_s": swap.seconds, f"{role}/swap_bytes": swap.num_bytes}
