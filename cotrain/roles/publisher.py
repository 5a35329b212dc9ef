"""The drafter's part of a step: score it, decide on it, and send the engines what was decided.

A rollout is test data first and training data from then on. Before anything is trained on the rollouts of a step, the
serving drafter and the candidate, which is the trainer's drafter as the step before left it, are scored on them. The
swap follows at once, while the policy learns, so that what is published is what was scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.publish.acceptance import ExpectedAcceptance, expected_of
from cotrain.publish.alarms import Alarm, DrafterAlarm
from cotrain.publish.decision import Decision, decide
from cotrain.publish.evidence import Delivery, Evidence, Publication
from cotrain.records import RolloutBatch, SpeculationCounts, SwapReport, Versions, WeightPayload
from cotrain.roles.engines import RolloutEngines
from cotrain.roles.learners import Learner
from cotrain.run.decisions import DrafterEvent
from cotrain.transport.payload import WeightUpdateRefused

DELIVERY_CHECK_STEPS = 10
"""The served drafter weights are read back in every tenth step, beside the read-back of each update: what is lost in
between (sleep, a reload) costs acceptance only, and reading back takes about as long as a swap."""


@dataclass
class Outcome:
    """What a step did to the drafter."""

    metrics: dict[str, float]
    events: list[DrafterEvent] = field(default_factory=list)
    swap: SwapReport | None = None
    expected: ExpectedAcceptance | None = None
    """What a published candidate is expected to reach."""
    trains: bool = False
    """Whether the drafter is to be trained on this step's rollouts."""
    failure: DrafterAlarm | None = None
    """To be raised once the events are recorded."""


class Publisher:
    """Decides after each step which drafter serves, and remembers what the next decision needs."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Learner,
        engines: RolloutEngines,
        scratch: Path,
        sent: WeightPayload | None,
        versions: Versions,
    ):
        """sent: the drafter that the engines were started with. versions: what they serve."""
        assert config.drafter is not None
        self._run, self._config = config, config.drafter
        self._trainer, self._engines, self._scratch, self._sent = trainer, engines, scratch, sent
        self.serving = Publication(versions.drafter, versions.drafter, versions.policy)
        self.mode: str | None = None
        """What every step line says while alarms have switched speculation off."""

    def evaluate(self, step: int, batch: RolloutBatch, versions: Versions, found: Sequence[Alarm] = ()) -> Outcome:
        """Decide on the step's rollouts, generated under `versions`, and swap. Call it before training on them.

        found: alarms of other checks of this step. Engines that refuse a drafter go on with the one they have, all of
        them, and so does the run.
        """
        serving = self.serving
        keep = {serving.version, serving.last_good}
        scores, metrics = self._trainer.call("take_in", batch.features, serving.version, keep)
        expected = expected_of(scores.serving, scores.prompts)
        evidence = Evidence(step, batch, versions, serving, scores, expected, self._delivery(step))
        decision = decide(evidence, self._config, self._run.steps, found)
        self.serving = decision.serving
        metrics |= _expected_metrics(expected, batch.speculation) | dict(decision.metrics)
        outcome = Outcome(metrics, list(decision.events))
        if decision.action == "stop":
            self._stop(step, decision, outcome)
        elif decision.action != "keep":
            self._swap(decision, versions, outcome)
        for name, action in (("published", "publish"), ("rolled_back", "roll back")):
            metrics[f"drafter/{name}"] = float(outcome.swap is not None and decision.action == action)
        outcome.trains = self._config.train and decision.action != "stop" and step % self._config.train_every == 0
        return outcome

    def state(self) -> dict[str, Any]:
        """Everything an exact continuation needs, as plain numbers."""
        return {"serving": asdict(self.serving), "mode": self.mode}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.serving = Publication(**state["serving"])
        self.mode = state["mode"]
        if self.mode is not None:
            self._engines.call("set_num_speculative_tokens", 0)

    def _delivery(self, step: int) -> Delivery | None:
        if self._sent is None or step % DELIVERY_CHECK_STEPS:
            return None
        return Delivery(self._sent.digests, self._engines.call("served_digests", sorted(self._sent.digests), True))

    def _stop(self, step: int, decision: Decision, outcome: Outcome) -> None:
        """Fail, or go on without speculation, as the configuration has it. A fatal alarm fails either way."""
        alarms = decision.alarms
        if self._config.on_drafter_failure == "stop" or any(alarm.fatal for alarm in alarms):
            outcome.failure = DrafterAlarm(step, alarms)
            return
        self.mode = f"without speculation since step {step} ({', '.join(alarm.name for alarm in alarms)})"
        self._engines.call("set_num_speculative_tokens", 0)

    def _swap(self, decision: Decision, versions: Versions, outcome: Outcome) -> None:
        """Freeze the weights under the next version and send them. The event of the action is the decision's last."""
        rolls_back, expected = decision.action == "roll back", decision.expected
        weights_of = self.serving.last_good if rolls_back else None
        version = self._trainer.call("publish", weights_of)
        payload = self._trainer.call("write_payload", self._scratch / "drafter.safetensors", version)
        try:
            swap = self._engines.update_drafter(payload, version, None if expected is None else expected.rates[-1])
        except WeightUpdateRefused as error:
            reason = f"version {version} refused by the engines, all keep what they serve: {error}"
            outcome.events[-1] = replace(outcome.events[-1], kind="refused", reason=reason, numbers={})
            return
        if rolls_back:
            self._engines.call("clear_drafter_cache")  # the bad drafter may have left NaN there
            self.serving = self.serving.rolled_back(version, swap.seconds)
        else:
            scored = expected is not None
            self.serving = self.serving.published(version, versions.policy, swap.seconds, scored)
        self._sent, outcome.swap, outcome.expected = payload, swap, expected
        outcome.events[-1] = replace(outcome.events[-1], version=version)


def _expected_metrics(expected: ExpectedAcceptance | None, counts: SpeculationCounts | None) -> dict[str, float]:
    """Acceptance expected of the serving drafter on these rollouts: at the draft lengths served, and at the longest."""
    if expected is None:
        return {}
    metrics = {"rollout/expected_acceptance_length_longest": expected.longest.value}
    if counts is not None and expected.covers(counts.steps):
        metrics["rollout/expected_acceptance_length"] = expected.at(counts.steps).value
        rates = expected.rates_at(counts.steps)
        metrics |= {f"rollout/expected_rate_pos_{k}": rate for k, rate in enumerate(rates, start=1)}
    return metrics
