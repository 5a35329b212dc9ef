"""The loop of a run. docs/internals/architecture.md draws it; docs/guide/asynchronous.md describes generation ahead of learning.

With stream.max_policy_lag = 0, no group is being generated when weights change. With a larger lag, groups of later steps are
generated all the time, and engines take weights in the middle of them. Every token carries the versions that generated it.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from cotrain.acceptance_stats import counts_by_depth
from cotrain.config.schema import RunConfig
from cotrain.loop.checks import Checks
from cotrain.loop.ledger import Group, check_lag, reward_queue_s
from cotrain.loop.producer import Producer, Prompts
from cotrain.loop.roles import Roles
from cotrain.loop.saving import Checkpoints
from cotrain.loop.step import Clock, StepResult
from cotrain.loop.training import DrafterTraining
from cotrain.policy.learner import PolicyLearner
from cotrain.policy.losses import group_advantages
from cotrain.process.calls import Reply
from cotrain.process.failures import RunFailure, TaskFailed
from cotrain.publish.alarms import DrafterAlarm
from cotrain.publish.decision import Outcome
from cotrain.records import RolloutBatch, ScoredRollout, SwapReport, Versions, WeightPayload
from cotrain.run.checkpoint import RunState
from cotrain.run.console import Console
from cotrain.run.rows import RowFile
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from cotrain.tasks.prompts import write_samples
from cotrain.trainer.spec import tap_share
from cotrain.trainer.trainer import DrafterTrainer

POLICY_FILE = "policy.safetensors"
"""File with the policy's weights on their way to the engines, in a shared-memory folder of the learner's node."""

SAMPLES = 4  # rollouts of a step that are written for people to read


@dataclass
class Records:
    """The run's output files and trackers."""

    metrics: RowFile
    decisions: RowFile
    events: RowFile  # events of each group, and the times of updates and training rounds
    steps: RowFile  # engine steps and acceptance, for `cotrain simulate`
    tracker: Tracker
    console: Console

    def event(self, step: int, event: str, **fields: Any) -> None:
        """Write an event of now."""
        self.events.write(step, {"time": time.time(), "event": event} | fields)

    def decided(self, outcome: Outcome) -> None:
        """Record what was decided about the drafter. Raises the failure that ends the run, if there is one."""
        for event in outcome.events:
            self.decisions.write(event.step, asdict(event))
        if outcome.failure is not None:
            raise outcome.failure


class Controller:
    """Drives the roles through the steps of a run."""

    def __init__(
        self, config: RunConfig, run_dir: RunDir, roles: Roles, prompts: Prompts, records: Records, state: RunState
    ):
        """state: the progress to continue from. The roles must have been started from it."""
        self.config, self.run_dir, self.roles, self.prompts, self.records = config, run_dir, roles, prompts, records
        self.state = state  # where the run stands after its last whole step
        self.last_rollouts: list[ScoredRollout] = []  # the rollouts that the last step trained on
        self.producer = Producer(config, roles, prompts, records.events, state)
        self._checkpoints = Checkpoints(config, run_dir, roles)
        self.checks = Checks(config, roles, records.console, state)
        self._training: DrafterTraining | None = None
        if roles.drafter is not None:
            updates = state.drafting["updates"] if state.drafting is not None else ()
            self._training = DrafterTraining(config, roles.drafter, roles.reactor, records.events, updates)
        self._heads: list[Reply[None]] = []  # the call in which the trainer reads the policy's head
        if state.drafting is not None and roles.publisher is not None:
            roles.publisher.load_state(state.drafting)

    def run(self, stop_requested: Callable[[], bool] = lambda: False) -> bool:
        """Run all remaining steps. Returns False if stop_requested ended it before; the run is saved either way.

        Raises RunFailure before the first step when a checkpoint without its tensors cannot be saved.
        """
        try:
            self._checkpoints.try_out(self._snapshot())
        except Exception as error:
            failure = f"checkpoints of this run cannot be saved in {self.run_dir.checkpoints}: {error}"
            raise RunFailure(failure) from error
        try:
            while self.step < self.config.steps and not stop_requested():
                self._report(self._one_step(self.step + 1, stop_requested))
                if self.roles.validation is not None and self.roles.validation.failure is not None:
                    raise self.roles.validation.failure
            self._save_last()
        except TaskFailed as failure:
            # The producer raises it before anything of the step is trained on, so what is finished can be saved.
            self._save_last()
            advice = f"{self.step} steps are saved: mend that, and continue with cotrain train {self.run_dir.resume}"
            raise TaskFailed(f"step {self.step + 1}: {failure}\n  See {self.run_dir.logs}. {advice}") from None
        except Exception:
            with suppress(RunFailure):  # a role that has died has not saved
                self._checkpoints.finish()
            raise
        return self.step == self.config.steps

    def _save_last(self) -> None:
        """Save the last whole step, unless it has been."""
        self._checkpoints.finish()
        if self.step and not self.run_dir.checkpoint(self.step).exists():
            self._checkpoints.begin(self._snapshot())
            self._checkpoints.finish()

    @property
    def step(self) -> int:
        """Whole steps so far."""
        return self.state.step

    @property
    def versions(self) -> Versions:
        """The versions that all engines serve."""
        return self.roles.current.versions

    @property
    def mode(self) -> str | None:
        """Text that every step line shows while an alarm has switched speculation off; None otherwise."""
        return None if self.roles.publisher is None else self.roles.publisher.mode

    def _one_step(self, step: int, stop_requested: Callable[[], bool]) -> StepResult:
        clock, served, lag = Clock(self.records.console), self.versions, self.config.stream.max_policy_lag
        speculates = self.config.speculates and self.mode is None
        taps = speculates and self.roles.drafter is not None
        self.producer.admit(tap_share(self.config, self.last_rollouts) if taps else 0.0)
        stream = self.producer.metrics()
        with clock.phase(waiting := "wait_for_rollouts" if lag else "generate"):
            groups = self.roles.reactor.until(self._take)
        clock.seconds["reward_queue"] = min(reward_queue_s(groups), clock.seconds[waiting])
        scored = self._scored(groups)
        rollouts = [one.rollout for one in scored]
        batch, engine_steps = self.producer.windows.take(rollouts, clock.seconds.get("wait_for_rollouts", 0.0))
        check_lag(rollouts, served, lag)
        if taps:
            self.checks.features(batch, served.policy, clock)
        outcomes, lossless = self._check_distribution(step, scored, clock) if speculates else ([], {})
        history = self.roles.engines.history_metrics() if self.config.rollout.history is not None else {}
        with clock.phase("learn"):
            outcome, learned, payload = self._learn(step, scored, batch, clock)
        self.checks.log_probs(step, learned, max(served.policy - r.segments[0].versions.policy for r in rollouts))
        swaps: dict[str, SwapReport] = {}
        if payload is not None:
            with clock.phase("swap_policy"):
                swaps["policy"] = self._swap_policy(step, payload)
        self.producer.release()
        if self.roles.validation is not None and self.roles.validation.due(step):
            with clock.phase("validation"):
                learned |= self.roles.validation.metrics(self.roles.engines)
        if outcome is not None:
            outcomes.append(outcome)
            if outcome.swap is not None:
                swaps["drafter"], event = outcome.swap, outcome.events[-1]
                folder, data = self.run_dir.drafter(event.version), f"{self.config.name}:rollouts to step {step - 1}"
                tags = {"data_fingerprint": data, "decision": event.reason}
                self.records.tracker.log_drafter(folder, self.versions, step, outcome.promised, tags)
        seconds = self.state.seconds + clock.step_seconds
        self.state = replace(self.state, step=step, versions=self.versions, seconds=seconds)
        last = step == self.config.steps or stop_requested()
        if last or step % self.config.checkpoint.every == 0:
            with clock.phase("checkpoint"):
                if self._training is not None and not self.config.stream.max_policy_lag:
                    self._training.finish()  # a checkpoint has whole rounds, so that a resumed run goes on exactly
                self._checkpoints.begin(self._snapshot())
                if last:  # no step follows in which the roles could write
                    self._checkpoints.wait()
        seconds_of = clock.seconds | {"step": clock.step_seconds}
        if self._training is not None:
            self._training.measure(engine_steps, seconds_of)
        return StepResult(
            step=step,
            served=served,
            scored=scored,
            prompts={group.prompt.id: group.prompt for group in groups},
            batch=batch,
            engine_steps=engine_steps,
            stream=stream | self.producer.losses(),
            lossless=lossless,
            history=history,
            outcomes=outcomes,
            learned=learned,
            swaps=swaps,
            saved=self._checkpoints.metrics(),
            seconds=seconds_of,
        )

    def _take(self) -> list[Group] | None:
        self._checkpoints.poll()
        return self.producer.take()

    def _scored(self, groups: list[Group]) -> list[ScoredRollout]:
        scored = list[ScoredRollout]()
        for group in groups:
            advantages = group_advantages(group.rewards, self.config.policy.advantage)
            samples = zip(group.rollouts, group.rewards, advantages, strict=True)
            scored += [ScoredRollout(*fields) for fields in samples]
        return scored

    def _check_distribution(
        self, step: int, scored: list[ScoredRollout], clock: Clock
    ) -> tuple[list[Outcome], dict[str, float]]:
        """Return what an alarm has led to, if there is one, and the metrics of the check. Raises DrafterAlarm if one ends the run."""
        alarms, metrics = self.checks.distribution(step, scored, self.versions.policy, self.state.seconds, clock)
        if not alarms:
            return [], metrics
        if self.roles.publisher is None:
            raise DrafterAlarm(step, alarms)
        outcome = self.roles.publisher.heed(step, alarms)
        self.records.decided(outcome)
        return [outcome], metrics

    def _learn(
        self, step: int, scored: list[ScoredRollout], batch: RolloutBatch, clock: Clock
    ) -> tuple[Outcome | None, dict[str, float], WeightPayload | None]:
        """Update the policy. Meanwhile, score the drafters and decide which one serves. Then begin to train the drafter, if that pays.

        Training continues during the next step; without lag, drafters are scored only once it has ended. Returns the decision,
        the metrics of all learning, and the file of the new weights. Raises DrafterAlarm, once recorded, if one ends the run.
        """
        policy, drafter, publisher = self.roles.policy, self.roles.drafter, self.roles.publisher
        update = policy.begin_update(scored) if self.config.policy.train else None
        outcome: Outcome | None = None
        metrics: dict[str, float] = {}
        payload = None
        if drafter is not None and publisher is not None and self.mode is None:
            self.roles.reactor.wait(self._heads)
            if self._training is not None and not self.config.stream.max_policy_lag:
                self._training.finish()
            spent = self._training.costs.spent(self.state.seconds) if self._training is not None else None
            outcome = publisher.evaluate(step, batch, spent)
            if self._training is not None:
                outcome.events[:0] = self._training.starts(step, self.versions.drafter, self.run_dir.starts)
            self.records.decided(outcome)
            if outcome.swap is not None:
                version = outcome.events[-1].version
                self.records.event(step, "drafter swapped", version=version)
                drafter.call(DrafterTrainer.save_checkpoint, self.run_dir.drafter(version), version)
        else:
            self.roles.nodes.remove_all(batch.features)  # tapped before speculation was switched off
        if update is not None:
            self.roles.reactor.wait(update)
            metrics = policy.finish(update)
            began, ended = policy.last_call
            clock.seconds["update"] = ended - began
            self.records.events.write(step, {"time": ended, "event": "policy updated", "seconds": ended - began})
            # The trainer must have read the file before it is written again.
            self.roles.reactor.wait(self._heads)
            file = self.roles.nodes.scratch[policy.node] / POLICY_FILE
            written = policy.begin(PolicyLearner.write_payload, file)
            self.roles.reactor.wait(written)
            payload = policy.of_rank_0(written)
            self.roles.engines.begin_check_policy(payload, policy.node)
        if self._training is not None:
            metrics = metrics | self._training.metrics()
            if outcome is not None and outcome.trains:
                self._training.begin(step)
        return outcome, metrics, payload

    def _swap_policy(self, step: int, payload: WeightPayload) -> SwapReport:
        drafter, nodes, version = self.roles.drafter, self.roles.nodes, self.versions.policy + 1
        if drafter is not None:
            # The trainer comes before the engines, so that it knows the new version when features of it arrive.
            path = None if self.config.policy.lora else nodes.bring(payload.path, drafter.node)
            self._heads = drafter.begin(DrafterTrainer.set_target_weights, path, version)
        swap = self.roles.engines.update_policy(payload, version)
        self.records.event(step, "policy swapped", version=version)
        return swap

    def _report(self, result: StepResult) -> None:
        """Record a step that has ended."""
        step, row, records = result.step, result.row(self.config), self.records
        self.last_rollouts = result.scored
        acceptance = counts_by_depth(one.rollout for one in result.scored)
        records.steps.write(step, {"engines": result.engine_steps, "acceptance": acceptance})
        records.metrics.write(step, row)
        records.tracker.log_step(step, row)
        write_samples(self.run_dir.samples_file(step), result.scored[:SAMPLES], result.prompts, self.prompts.tokenizer)
        events = [event for outcome in result.outcomes for event in outcome.events]
        waits = [outcome.waits for outcome in result.outcomes]
        notes = [records.tracker.behind, *(event.in_short() for event in events), *waits, self.mode or ""]
        records.console.step(step, self.config.steps, row, self.versions, notes)
        for event in events:
            if event.is_bad_news:
                records.console.say(f"  {event.kind}: {event.reason}")

    def _snapshot(self) -> RunState:
        """Return the state with all that a checkpoint holds besides what the roles save."""
        publisher, updates = self.roles.publisher, self._training.rows if self._training is not None else []
        return replace(
            self.state,
            config=self.config.model_dump(mode="json"),
            lossless=self.checks.monitor.state(),
            drafting=None if publisher is None else publisher.state() | {"updates": updates},
            stream=self.producer.state(),
        )
