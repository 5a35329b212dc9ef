"""The loop of a run. docs/internals/architecture.md draws it; docs/guide/asynchronous.md describes generation ahead of learning.

With stream.max_policy_lag = 0, no group is being generated when weights change. With a larger lag, groups of later steps are
generated all the time, and engines take weights in the middle of them. Every token carries the versions that generated it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from cotrain.acceptance_stats import counts_by_depth, last_segment
from cotrain.actors.drafter import Drafter
from cotrain.actors.engines import RolloutEngines
from cotrain.actors.learner import Pending
from cotrain.actors.policy import Policy
from cotrain.actors.rewards import Rewards
from cotrain.config.schema import RunConfig
from cotrain.loop.ledger import check_lag
from cotrain.loop.producer import GroupResult, Producer, Prompts
from cotrain.loop.reactor import Reactor
from cotrain.loop.training import DrafterTraining
from cotrain.lossless.monitor import LosslessMonitor
from cotrain.policy.losses import group_advantages
from cotrain.process.failures import RunFailure, TaskFailed
from cotrain.publish.alarms import Alarm, DrafterAlarm
from cotrain.publish.decision import Outcome
from cotrain.publish.events import DrafterEvent
from cotrain.publish.publisher import Publisher
from cotrain.records import GainReport, Prompt, RolloutBatch, ScoredRollout, StepTotal, SwapReport, Versions
from cotrain.run.checkpoint import RunState, new_checkpoint
from cotrain.run.console import Console
from cotrain.run.rows import RowFile
from cotrain.run.run_dir import RunDir
from cotrain.run.step_metrics import idle_metrics, lag_metrics, rollout_metrics
from cotrain.run.tracking import Tracker
from cotrain.tasks.prompts import write_samples
from cotrain.trainer.self_check import check_features, check_log_probs, check_records
from cotrain.transport.nodes import Nodes
from cotrain.weights.versions import CurrentWeights
from drafters.base import SamplingParams
from drafters.files import end_token_ids

POLICY_FILE = "policy.safetensors"
"""File with the policy's weights on their way to the engines, in a shared-memory folder of the learner's node."""

HISTORY = "history.safetensors"
"""File of a checkpoint with the index of finished rollouts, if the engines draft from history."""


@dataclass
class Roles:
    """The roles of a run, and the nodes that they run on.

    `drafter` and `publisher` are None without speculation. A frozen drafter also has a trainer, which only scores it.
    """

    engines: RolloutEngines
    rewards: Rewards
    policy: Policy
    drafter: Drafter | None
    publisher: Publisher | None
    reactor: Reactor
    nodes: Nodes
    current: CurrentWeights


@dataclass
class Records:
    """The run's output files and trackers."""

    metrics: RowFile
    decisions: RowFile
    events: RowFile
    """Events of each group, and the times of updates and training rounds."""
    steps: RowFile
    """Engine steps and acceptance, for `cotrain simulate`."""
    tracker: Tracker
    console: Console


class Controller:
    """Drives the roles through the steps of a run."""

    def __init__(
        self, config: RunConfig, run_dir: RunDir, roles: Roles, prompts: Prompts, records: Records, state: RunState
    ):
        """state: the progress to continue from. The roles must have been started from it."""
        self.config, self.run_dir, self.roles, self.prompts, self.records = config, run_dir, roles, prompts, records
        self.step, self._first_state = state.step, state
        self.run_seconds = state.seconds
        """Seconds of all steps, those before a resume included."""
        self.last_rollouts: list[ScoredRollout] = []
        """The rollouts that the last step trained on."""
        self.producer = Producer(config, roles.engines, roles.rewards, prompts, roles.reactor, records.events)
        self.producer.start(state.step, state.stream)
        self._lags = config.stream.max_policy_lag > 0
        self._training = (
            DrafterTraining(config, roles.drafter, roles.reactor, records.events) if roles.drafter else None
        )
        self._heads: Pending[None] = Pending([])  # the call in which the trainer reads the policy's head
        self._checked = False
        self._window_began, self._waited = time.perf_counter(), 0.0
        rollout = config.rollout
        self._sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
        self.monitor = LosslessMonitor(config.lossless, self._sampling, rollout.dtype, config.seed)
        if state.lossless is not None:
            self.monitor.load_state(state.lossless)
        if state.drafting is not None and roles.publisher is not None:
            roles.publisher.load_state(state.drafting)
        self._seconds: dict[str, float] = {}
        self._events: list[DrafterEvent] = []  # of the present step
        self._engine_steps: dict[int, list[StepTotal]] = {}

    def run(self, stop_requested: Callable[[], bool] = lambda: False) -> bool:
        """Run all remaining steps. Returns False if stop_requested ended it before; the run is saved either way.

        Raises RunFailure before the first step when a checkpoint without its tensors cannot be saved.
        """
        try:
            self._save(trial=True)
        except Exception as error:
            raise RunFailure(
                f"checkpoints of this run cannot be saved in {self.run_dir.checkpoints}: {error}"
            ) from error
        while self.step < self.config.steps and not stop_requested():
            try:
                self._one_step(self.step + 1)
            except TaskFailed as failure:
                raise self._saved(failure) from None
            self.step += 1
            last = self.step == self.config.steps or stop_requested()
            if last or self.step % self.config.checkpoint.every == 0:
                self._save()
        return self.step == self.config.steps

    @property
    def versions(self) -> Versions:
        """The versions that all engines serve."""
        return self.roles.current.versions

    @property
    def mode(self) -> str | None:
        """Text that every step line shows while an alarm has switched speculation off; None otherwise."""
        return None if self.roles.publisher is None else self.roles.publisher.mode

    def _one_step(self, step: int) -> None:
        self._seconds, self._events = {}, []
        started = time.perf_counter()
        served = self.versions
        speculates = self.config.speculates and self.mode is None
        taps = speculates and self.roles.drafter is not None
        self.producer.admit(taps)
        row = self.producer.metrics()
        with self._timed("wait_for_rollouts" if self._lags else "generate"):
            groups = self._take()
        rollouts = self._scored(groups)
        window = self._window(rollouts)
        row |= lag_metrics([scored.rollout for scored in rollouts], served.policy)
        check_lag([scored.rollout for scored in rollouts], served, self.config.stream.max_policy_lag)
        if taps and window is not None and not self._checked:
            self._check_batch(window)
        recomputes = self.config.stream.on_swap != "keep_kv"
        row |= rollout_metrics(rollouts, window, served.drafter, recomputes, self.config.rollout.num_engines)
        if speculates and (alarms := self._check_distribution(step, rollouts, row)):
            if self.roles.publisher is None:
                raise DrafterAlarm(step, alarms)
            self._record(self.roles.publisher.heed(step, alarms), row)
        if self.config.rollout.history is not None:
            row |= self.roles.engines.proposer_metrics()
        with self._timed("learn"):
            outcome = self._learn(step, rollouts, window, row)
        self._check_log_probs(step, row)
        if self.config.policy.train:
            with self._timed("swap_policy"):
                self._swap_policy(step, row)
        self.producer.release()
        if outcome is not None and outcome.swap is not None:
            row |= _swap_metrics("drafter", outcome.swap)
            self._keep_drafter(step, outcome)
        self.last_rollouts = rollouts
        row |= {"versions/policy": served.policy, "versions/drafter": served.drafter}
        row |= {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        row["time/step_s"] = time.perf_counter() - started
        generating = {i: sum(total.seconds for total in steps) for i, steps in self._engine_steps.items()}
        engines = [generating.get(i, 0.0) for i in range(self.config.rollout.num_engines)] if window is not None else []
        span = window.seconds if self._lags and window is not None else row["time/step_s"]
        row |= idle_metrics(row, engines, span, self.roles.drafter is not None)
        self.run_seconds += row["time/step_s"]
        prompts = {group.prompt.id: group.prompt for group in groups}
        self._report(step, row, rollouts, prompts)

    def _take(self) -> list[GroupResult]:
        taken: list[GroupResult] = []

        def is_there() -> bool:
            taken.extend(self.producer.take() or ())
            return bool(taken)

        self.roles.reactor.until(is_there)
        return taken

    def _scored(self, groups: list[GroupResult]) -> list[ScoredRollout]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [reward for group in groups for reward in group.rewards]
        # Not by prompt: where another prompt has taken the place of one that was lost, two groups may have the same.
        places = [str(place) for place, group in enumerate(groups) for _ in group.rollouts]
        advantages = group_advantages(places, rewards, self.config.policy.advantage)
        return [ScoredRollout(*fields) for fields in zip(rollouts, rewards, advantages, strict=True)]

    def _window(self, rollouts: list[ScoredRollout]) -> RolloutBatch | None:
        """Return what the engines have generated since the last window: without lag, the rollouts of the step.

        With lag, None if no group has ended since. What the engines measure meanwhile, and the time, count in the next window.
        """
        self._waited += self._seconds.get("wait_for_rollouts", 0.0)
        drafter, nodes = self.roles.drafter, self.roles.nodes
        window = self.producer.window(partial(nodes.bring, node=drafter.node, move=True) if drafter else str)
        if window is None:
            return None
        windows = self.roles.engines.take_windows()
        gains = [seen.gain for seen in windows.values() if seen.gain is not None]
        self._engine_steps = {engine: seen.steps for engine, seen in windows.items()}
        window = replace(window, gain=sum(gains, start=GainReport()) if gains else None)
        if not self._lags:
            return replace(window, rollouts=[scored.rollout for scored in rollouts])
        now = time.perf_counter()
        seconds, self._window_began = now - self._window_began, now
        waited, self._waited = self._waited, 0.0
        return replace(window, seconds=seconds, exposed=min(1.0, waited / seconds))

    def _check_batch(self, batch: RolloutBatch) -> None:
        """Check what the engines handed over, in the first step with rollouts of the learner's own policy version."""
        rollout = self.config.rollout
        with self._timed("self_check"):
            shards = [self.roles.nodes.bring(shard, self.roles.nodes.local) for shard in batch.features]
            here, forward = replace(batch, features=shards), self.roles.policy.hidden_states
            error = check_features(here, forward, rollout.dtype, self.versions.policy)
            check_records(here, () if rollout.ignore_eos else end_token_ids(self.roles.nodes.model_path))
            self.roles.nodes.remove_all(set(shards).difference(batch.features))
        if error is not None:
            self._checked = True
            self.records.console.say(f"tapped hidden states are the policy's own (relative error {error:.1g})")

    def _check_log_probs(self, step: int, row: dict[str, float]) -> None:
        """Check the first step or, with lag and unless on_swap is keep_kv, each step's tokens from the newest policy."""
        rollout, gap = self.config.rollout, row.get("policy/rollout_log_prob_gap")
        if self._lags and self.config.stream.on_swap != "keep_kv":
            gap = row.get("policy/rollout_log_prob_gap_lag_0") if row["stream/lag_max"] else gap
        elif step != self._first_state.step + 1 or row["stream/lag_max"]:
            return
        if gap is not None and rollout.top_p == 1 and rollout.top_k == 0:
            check_log_probs(gap, rollout.dtype)

    def _check_distribution(self, step: int, rollouts: list[ScoredRollout], row: dict[str, float]) -> list[Alarm]:
        """Check, when due, that the tokens that the learner's current policy generated have its distribution.

        It checks whole last segments of the step's rollouts. A step takes its groups by number: among rollouts that
        happen to have ended first, short ones would be seen too often.
        """
        monitor, started = self.monitor, time.perf_counter()
        tails = [last_segment(scored.rollout) for scored in rollouts]
        current = [rollout for rollout in tails if rollout.versions.policy == self.versions.policy]
        chosen = monitor.choose(current) if current and monitor.due(step, self.run_seconds) else None
        if chosen is None:
            return []
        arguments = chosen.rollouts, self._sampling, monitor.logit_tolerance
        with self._timed("lossless"):
            draws = self.roles.policy.response_draws(*arguments)
            verdict, metrics = monitor.check(step, chosen, draws, time.perf_counter() - started)
        row |= metrics
        if verdict.passed:
            return []
        what = f"rollouts do not have the policy's distribution: {verdict}"
        cause = "speculation is not lossless on this engine, or the engines serve other policy weights"
        remedy = "find out with cotrain verify; drafter=none runs without speculation"
        return [Alarm("not_lossless", what, cause, remedy, metrics)]

    def _learn(
        self,
        step: int,
        rollouts: list[ScoredRollout],
        window: RolloutBatch | None,
        row: dict[str, float],
    ) -> Outcome | None:
        """Update the policy. Meanwhile, score the drafters, decide which one serves, and train the drafter.

        With lag, the drafter's training continues during the next step. Raises DrafterAlarm, once recorded, if one ends the run.
        """
        policy, drafter, publisher = self.roles.policy, self.roles.drafter, self.roles.publisher
        update = policy.begin_update(rollouts) if self.config.policy.train else None
        outcome = None
        if drafter is not None and publisher is not None and self.mode is None:
            self.roles.reactor.wait(self._heads.references)
            outcome = publisher.evaluate(step, window or RolloutBatch([], [], None, 0.0, 0))
            self._record(outcome, row)
            if outcome.swap is not None:
                version = outcome.events[-1].version
                self._event(step, "drafter swapped", version=version)
                drafter.save_checkpoint(self.run_dir.drafter(version), version)
            if outcome.trains and self._training is not None:
                self._training.begin(step)
        elif window is not None:
            self.roles.nodes.remove_all(window.features)  # tapped before speculation was switched off
        if update is not None:
            self.roles.reactor.wait(update.references)
            metrics = policy.finish(update)
            row |= metrics
            began, ended = policy.last_call
            self._seconds["update"] = ended - began
            self.records.events.write(step, {"time": ended, "event": "policy updated", "seconds": ended - began})
        if self._training is not None:
            if not self._lags:
                self._training.finish()
            row |= self._training.metrics()
        return outcome

    def _record(self, outcome: Outcome, row: dict[str, float]) -> None:
        """Record what was decided about the drafter. Raises the failure that ends the run, if there is one."""
        row |= outcome.metrics
        self._events += outcome.events
        for event in outcome.events:
            self.records.decisions.write(event.step, asdict(event))
        if outcome.events:
            self.records.tracker.log_decisions(self.records.decisions.path, outcome.events[-1])
        if outcome.failure is not None:
            raise outcome.failure

    def _swap_policy(self, step: int, row: dict[str, float]) -> None:
        drafter, nodes, ledger, reactor = self.roles.drafter, self.roles.nodes, self.producer.ledger, self.roles.reactor
        if self.config.stream.on_swap == "finish":
            started = time.perf_counter()
            reactor.until(lambda: not ledger.count("admitted", "dispatched"))
            self._waited += time.perf_counter() - started
        reactor.wait(self._heads.references)  # the trainer must have read the file before it is written again
        version = self.versions.policy + 1
        payload = self.roles.policy.write_payload(nodes.scratch[self.roles.policy.node] / POLICY_FILE)
        if drafter is not None:
            # The trainer comes before the engines, so that it knows the new version when features of it arrive.
            self._heads = drafter.begin_set_target_weights(nodes.bring(payload.path, drafter.node), version)
        keeps = self.config.stream.on_swap == "keep_kv"
        row |= _swap_metrics("policy", self.roles.engines.update_policy(payload, version, keeps))
        self._event(step, "policy swapped", version=version)

    def _keep_drafter(self, step: int, outcome: Outcome) -> None:
        """Record that the engines now serve another drafter, and log this drafter in the registry."""
        drafter, config, event = self.roles.drafter, self.config.drafter, outcome.events[-1]
        assert drafter is not None and config is not None
        folder = self.run_dir.drafter(event.version)
        tags = {
            "init": config.init or "random",
            "data_fingerprint": f"{self.config.name}:rollouts to step {step - 1}",
            "decision": event.reason,
        }
        self.records.tracker.log_drafter(folder, self.versions, step, outcome.promised, tags)

    def _report(
        self,
        step: int,
        row: dict[str, float],
        rollouts: list[ScoredRollout],
        prompts: Mapping[str, Prompt],
    ) -> None:
        tracker, console = self.records.tracker, self.records.console
        acceptance = counts_by_depth(scored.rollout for scored in rollouts)
        self.records.steps.write(step, {"engines": self._engine_steps, "acceptance": acceptance})
        self._engine_steps = {}
        self.records.metrics.write(step, row)
        tracker.log_step(step, row)
        write_samples(self.run_dir.samples_file(step), rollouts, prompts, self.prompts.tokenizer)
        notes = [tracker.behind, *(event.in_short() for event in self._events), self.mode or ""]
        console.step(step, self.config.steps, row, self.versions, notes)
        for event in self._events:
            if event.is_bad_news:
                console.say(f"  {event.kind}: {event.reason}")

    def _saved(self, failure: TaskFailed) -> TaskFailed:
        """Save what is finished, since the producer raises the failure before anything of the step is trained on."""
        if self.step and not self.run_dir.checkpoint(self.step).exists():
            self._save()
        advice = f"{self.step} steps are saved: mend that, and continue with cotrain train {self.run_dir.resume}"
        return TaskFailed(f"step {self.step + 1}: {failure}\n  See {self.run_dir.logs}. {advice}")

    def _save(self, trial: bool = False) -> None:
        publisher, drafter = self.roles.publisher, self.roles.drafter
        state = replace(
            self._first_state,
            step=self.step,
            versions=self.versions,
            config=self.config.model_dump(mode="json"),
            seconds=self.run_seconds,
            lossless=self.monitor.state(),
            drafting=None if publisher is None else publisher.state(),
            stream=self.producer.state(),
        )
        with new_checkpoint(self.run_dir, state, self.config.checkpoint.keep_last, trial) as folder:
            self.roles.policy.save(folder / "policy", not trial)
            if drafter is not None and not trial:  # the first drafter has been saved into the run folder
                drafter.save(folder / "drafter")
            if self.config.rollout.history is not None:
                self.roles.engines.save_history(folder / HISTORY)

    def _event(self, step: int, event: str, **fields: Any) -> None:
        self.records.events.write(step, {"time": time.time(), "event": event} | fields)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.records.console.phase(name.replace("_", " "), terminal_only=True):
            yield
        self._seconds[name] = time.perf_counter() - started


def _swap_metrics(role: str, swap: SwapReport) -> dict[str, float]:
    return {f"{role}/swap_s": swap.seconds, f"{role}/swap_bytes": swap.num_bytes}
