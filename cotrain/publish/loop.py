"""What happens to the drafter in one step of a run: it is watched, judged, trained, published or taken back.

A rollout is test data first and training data from then on. The rollouts of a step are scored under two drafters
before anything is trained on them: the one that the engines serve, and the candidate, which is the trainer's drafter as
the step before left it. Their difference decides on the candidate (gate.py); the served one's expectation is held
against what the engines counted on these very rollouts (alarms.py); and a publication is watched for some steps
(canary.py). What is published is what was scored: its weights are frozen before the session of this step begins.
"""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from cotrain.config.schema import RunConfig
from cotrain.publish.alarms import Alarm, Delivery, StepRecord, check_step, lag_limit, respond
from cotrain.publish.canary import Canary, CanaryDecision
from cotrain.publish.drift import TrainTrigger
from cotrain.publish.expected import ExpectedAcceptance, expected_of, served_length
from cotrain.publish.gate import GateDecision, decide, pace_of
from cotrain.records import FeatureShard, RolloutBatch, SpeculationCounts, SwapReport, Versions, WeightPayload
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.run.decisions import DrafterEvent, Kind
from cotrain.trainer.trainer import FreshScores
from cotrain.transport.payload import WeightUpdateRefused


class Trainer(Protocol):
    """The drafter trainer, as far as this loop needs it; see `role.DrafterTraining`."""

    def take_in(
        self, shards: list[FeatureShard], serving: int, keep: Collection[int]
    ) -> tuple[FreshScores, dict[str, float]]: ...
    def start_training(self, step: int) -> Any: ...
    def finish_training(self, training: Any) -> dict[str, float]: ...
    def publish(self, path: Path, dtype: str, weights_of: int | None = None) -> tuple[WeightPayload, int]: ...


class Engines(Protocol):
    """The rollout engines, as far as this loop needs them."""

    def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """On all engines, or on none: raises WeightUpdateRefused, and all go on with what they had."""
        ...

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]:
        """Of each engine, read back whole."""
        ...

    def set_draft_tokens(self, draft_tokens: int | None) -> None: ...

    def clear_drafter_cache(self) -> None:
        """Forget cached prefixes and all that a drafter has left in the KV cache."""
        ...


class DrafterLoop:
    """The drafter's part of a step: begin, look, start_training and finish_training, swap, in this order."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        engines: Engines,
        scratch: Path,
        served: WeightPayload | None,
        versions: Versions,
    ):
        """versions: served now. served: the drafter that the engines were started with."""
        assert config.drafter is not None
        self._run, self._config, self._gate = config, config.drafter, config.drafter.gate
        self._trainer, self._engines, self._scratch = trainer, engines, scratch
        self._canary = Canary(self._gate, versions.drafter)
        self._trigger = TrainTrigger(self._gate, self._config.train_every)
        self._sent, self._swap_seconds = served, 0.0
        self._judged_on = self._policy_version = versions.policy
        self._offered_after = 0  # sessions since the last publication, when the gate last had a look
        self._lead: float | None = 0.0  # of the candidate over the served drafter, before this step's session
        self._session_seconds: float | None = None  # of a session whose gain is not known yet
        self.mode: str | None = None
        """What a step line says while alarms have switched speculation off."""
        self.begin()

    def begin(self) -> None:
        """A new step; what the last one left is forgotten."""
        self.metrics: dict[str, float] = {}
        """Of this step."""
        self.events: list[DrafterEvent] = []
        """Of this step."""
        self.promise: ExpectedAcceptance | None = None
        """Of the drafter that this step publishes."""
        self._outgoing: tuple[WeightPayload, int, GateDecision | CanaryDecision] | None = None
        self._train = False

    def look(self, step: int, batch: RolloutBatch, versions: Versions) -> None:
        """Judge the step's rollouts, generated under `versions`, and decide what to publish and whether to train.

        Raises DrafterAlarm.
        """
        self._policy_version = versions.policy
        if self.mode is not None:  # since this step's own check of losslessness
            for shard in batch.features:
                Path(shard.path).unlink()
            return
        good = {self._canary.serving, self._canary.last_good}
        scores, metrics = self._trainer.take_in(batch.features, self._canary.serving, good)
        self.metrics |= metrics
        expected = expected_of(scores.serving, scores.prompts) if scores.prompts else None
        self.metrics |= _expected_metrics(expected, batch.speculation)
        # What is expected of fewer positions than are drafted says nothing of what is counted.
        comparable = expected is not None and expected.draft_tokens >= self._run.rollout.draft_tokens
        judged_here = None if self._canary.watching or not comparable else expected
        whole = [r for r in batch.rollouts if r.drafted_throughout]
        counts = total_counts(r.speculation for r in whole)
        canary = self._canary.observe(counts, len({r.prompt_id for r in whole}))
        self.metrics |= canary.metrics()
        self.respond(step, self._alarms(step, batch, versions, judged_here))
        if self.mode is not None:
            return
        if canary.verdict == "roll back":
            self._prepare_rollback(canary)
        else:
            if canary.verdict == "kept":
                self._note(step, "kept", canary.reason, canary.metrics())
            self._judge_candidate(step, scores, batch)
        if self._config.train:
            self._plan_training(step, scores, batch, expected)

    def start_training(self, step: int) -> Any:
        """Begin this step's session, if there is one."""
        return self._trainer.start_training(step) if self._train else None

    def finish_training(self, training: Any) -> None:
        """Wait for `start_training`."""
        if training is not None:
            metrics = self._trainer.finish_training(training)
            self._session_seconds = metrics["drafter/train_s"]
            self.metrics |= metrics

    def swap(self, step: int) -> SwapReport | None:
        """Send to the engines what the look decided on. Call it between two steps; None when there was nothing to send.

        Engines that refuse go on with the drafter they have, all of them, and so does the run.
        """
        self.metrics["drafter/published"] = self.metrics["drafter/rolled_back"] = 0.0
        if self._outgoing is None:
            return None
        payload, version, decision = self._outgoing
        promise = decision.expected if isinstance(decision, GateDecision) else None
        if promise is not None and promise.draft_tokens < self._run.rollout.draft_tokens:
            promise = None  # for fewer positions than are drafted
        try:
            report = self._engines.update_drafter(payload, version, None if promise is None else promise.rates[-1])
        except WeightUpdateRefused as error:
            self._offered_after = 0
            self._note(step, "refused", f"version {version} refused by the engines, all keep what they serve: {error}")
            return None
        self._sent, self._swap_seconds = payload, report.seconds
        if isinstance(decision, GateDecision):
            self.promise = promise
            self._canary.published(version, promise)
            self._offered_after, self._lead, self._judged_on = 0, 0.0, self._policy_version
            self.metrics["drafter/published"] = 1.0
            self._note(step, "published", decision.reason, decision.metrics())
        else:
            self._engines.clear_drafter_cache()  # the bad drafter may have left NaN there
            self._canary.rolled_back(version)
            self._lead = None
            self.metrics["drafter/rolled_back"] = 1.0
            self._note(step, "rolled back", decision.reason, decision.metrics())
        return report

    @property
    def serving(self) -> int:
        """Drafter version of the engines."""
        return self._canary.serving

    def state(self) -> dict[str, Any]:
        """Everything an exact continuation needs, as plain numbers."""
        return {
            "canary": self._canary.state(),
            "trigger": self._trigger.state(),
            "judged_on": self._judged_on,
            "offered_after": self._offered_after,
            "lead": self._lead,
            "session_seconds": self._session_seconds,
            "swap_seconds": self._swap_seconds,
            "mode": self.mode,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._canary.load_state(state["canary"])
        self._trigger.load_state(state["trigger"])
        self._judged_on, self._offered_after = state["judged_on"], state["offered_after"]
        self._lead, self.mode = state["lead"], state["mode"]
        self._session_seconds, self._swap_seconds = state["session_seconds"], state["swap_seconds"]
        if self.mode is not None:
            self._engines.set_draft_tokens(0)

    # -- alarms --------------------------------------------------------------------------------------------------------

    def _alarms(
        self, step: int, batch: RolloutBatch, versions: Versions, expected: ExpectedAcceptance | None
    ) -> list[Alarm]:
        alarms = self._config.alarms
        record = StepRecord(
            rollouts=batch.rollouts,
            versions=versions,
            draft_length=self._longest_draft(batch),
            expected=expected,
            lag_versions=versions.policy - self._judged_on if self._config.train else None,
            deliveries=self._deliveries(step),
        )
        return check_step(record, alarms, lag_limit(alarms, self._config), self._run.steps)

    def _longest_draft(self, batch: RolloutBatch) -> int:
        """Draft tokens that an engine could verify; the speculation controller may have asked for none in time."""
        if batch.gain is None:
            return self._run.rollout.draft_tokens
        steps = batch.speculation.steps if batch.speculation else ()
        verified = max((k for k, count in enumerate(steps, start=1) if count), default=0)
        return max(batch.gain.longest_draft, verified)

    def _deliveries(self, step: int) -> Sequence[Delivery]:
        every = self._config.alarms.delivery_check_every
        if self._sent is None or not every or step % every:
            return ()
        return (
            Delivery("drafter", self._sent.digests, self._engines.served_digests(sorted(self._sent.digests), True)),
        )

    def respond(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Stop the run (raises DrafterAlarm), or go on without speculation, as the configuration has it."""
        for alarm in alarms:
            self.metrics[f"alarms/{alarm.name}"] = 1.0
            self._note(step, "alarm", str(alarm), alarm.numbers)
        mode = respond(step, alarms, self._config.on_drafter_failure)
        if mode is not None:
            self.mode = mode
            self._engines.set_draft_tokens(0)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _judge_candidate(self, step: int, scores: FreshScores, batch: RolloutBatch) -> None:
        sessions = scores.sessions
        if scores.candidate is None or sessions == self._offered_after or sessions % self._config.publish_every:
            return
        self._offered_after = sessions
        pace = pace_of(batch)
        if not scores.prompts or pace is None or not scores.serving[-1].known.any():
            decision = self._unjudged()
        else:
            decision = decide(
                scores.candidate, scores.serving, scores.prompts, pace, self._lifetime(), self._swap_seconds, self._gate
            )
        self.metrics |= decision.metrics()
        if decision.publish:
            payload, version = self._trainer.publish(self._scratch / "drafter.safetensors", self._run.rollout.dtype)
            self._outgoing = payload, version, decision
        elif decision.expected is None:
            self._note(step, "refused", decision.reason, decision.metrics())
        else:
            self._judged_on = self._policy_version
            self._note(step, "kept back", decision.reason, decision.metrics())

    def _unjudged(self) -> GateDecision:
        always = self._gate.publish_when == "always"
        verdict = 'published unjudged because publish_when = "always"' if always else "refused"
        reason = f"{verdict}: no rollout of this step has features of all its tokens, so nothing can be expected of it"
        return GateDecision(always, reason, self._gate.margin, self._swap_seconds, num_rollouts=0, num_groups=0)

    def _lifetime(self) -> int:
        """Steps until the next candidate may replace this one."""
        sessions = self._config.publish_every
        return sessions * self._config.train_every if self._gate.train_when == "every" else sessions

    def _prepare_rollback(self, canary: CanaryDecision) -> None:
        path = self._scratch / "drafter.safetensors"
        payload, version = self._trainer.publish(path, self._run.rollout.dtype, canary.roll_back_to)
        self._outgoing = payload, version, canary

    def _plan_training(
        self, step: int, scores: FreshScores, batch: RolloutBatch, expected: ExpectedAcceptance | None
    ) -> None:
        lead = _lead(scores)
        if self._session_seconds is not None and self._lead is not None and lead is not None:
            self._trigger.record_session(lead - self._lead, self._session_seconds)
        self._session_seconds, self._lead = None, lead
        pace = pace_of(batch)
        steps = _steps_expected(expected, total_counts(r.speculation for r in batch.rollouts if r.drafted_throughout))
        self._trigger.observe(
            None if expected is None else expected.longest,
            None if expected is None or steps is None else expected.at(steps),
            served_length(batch.rollouts),
        )
        decision = self._trigger.decide(step, pace if pace is not None and pace.drafts else None)
        self._train = decision.train
        if self._gate.train_when == "drift":
            self.metrics |= decision.metrics()
            if not decision.train:
                self._judged_on = self._policy_version

    def _note(self, step: int, kind: Kind, reason: str, numbers: Mapping[str, float] | None = None) -> None:
        finite = {name: value for name, value in (numbers or {}).items() if isfinite(value)}
        self.events.append(DrafterEvent(step, kind, self._canary.serving, reason, finite))


def _lead(scores: FreshScores) -> float | None:
    """Acceptance length of the candidate less that of the served drafter; None where no rollout has both."""
    if scores.candidate is None:
        return 0.0
    candidate, serving = scores.candidate[-1], scores.serving[-1]
    whole = candidate.steps.isfinite() & serving.steps.isfinite()
    if not whole.any():
        return None
    ours, theirs = (
        float(drafter.accepted[whole].sum() / drafter.steps[whole].sum()) for drafter in (candidate, serving)
    )
    return ours - theirs


def _steps_expected(expected: ExpectedAcceptance | None, counts: SpeculationCounts | None) -> tuple[int, ...] | None:
    """Verification steps by draft length; None without any, and where nothing is expected of some of them."""
    if expected is None or counts is None or not counts.num_drafts or any(counts.steps[expected.draft_tokens :]):
        return None
    return counts.steps


def _expected_metrics(expected: ExpectedAcceptance | None, counts: SpeculationCounts | None) -> dict[str, float]:
    """Acceptance expected of the served drafter on these rollouts: at the draft lengths served, and at the longest."""
    if expected is None:
        return {}
    metrics = {"rollout/expected_acceptance_length_longest": expected.longest.value}
    if (steps := _steps_expected(expected, counts)) is not None:
        metrics["rollout/expected_acceptance_length"] = expected.at(steps).value
        rates = expected.rates_at(steps)
        metrics |= {f"rollout/expected_rate_pos_{k}": rate for k, rate in enumerate(rates, start=1)}
    return metrics
