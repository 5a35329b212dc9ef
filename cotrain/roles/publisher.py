"""The drafter's part of a step: score it, decide on it, and send the engines what was decided.

A rollout is test data first and training data from then on. Before anything is trained on the rollouts of a step, the
serving drafter and the candidate, which is the trainer's drafter as the step before left it, are scored on them. The
swap follows at once, while the policy learns, so that what is published is what was scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.publish.acceptance import ExpectedAcceptance, expected_of
from cotrain.publish.alarms import Alarm
from cotrain.publish.decision import Outcome, decide
from cotrain.publish.evidence import Evidence, Publication
from cotrain.records import RolloutBatch, SpeculationCounts, Versions, WeightPayload
from cotrain.roles.engines import RolloutEngines
from cotrain.roles.learners import Learner
from cotrain.transport.payload import WeightUpdateRefused

DELIVERY_CHECK_STEPS = 10
"""The served drafter weights are read back in every tenth step, beside the read-back of each update: what is lost in
between (sleep, a reload) costs acceptance only, and reading back takes about as long as a swap."""


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
        self._config, self._total_steps = config.drafter, config.steps
        self._trainer, self._engines, self._scratch = trainer, engines, scratch
        self._sent = {} if sent is None else sent.digests
        self.serving = Publication(versions.drafter, versions.drafter, versions.policy)
        self.mode: str | None = None
        """What every step line says while alarms have switched speculation off."""

    def evaluate(self, step: int, batch: RolloutBatch, versions: Versions, found: Sequence[Alarm] = ()) -> Outcome:
        """Decide on the step's rollouts, generated under `versions`, and swap. Call it before training on them.

        found: alarms of other checks of this step. After an alarm the run goes on without speculation where it is
        configured to; a fatal one, and any other, is left to be raised. Engines that refuse a drafter go on with the
        one they have, all of them, and so does the run.
        """
        serving, sent = self.serving, self._sent
        keep = {serving.version, serving.last_good}
        scores, metrics = self._trainer.call("take_in", batch.features, serving.version, keep)
        expected = expected_of(scores.serving, scores.prompts)
        reads_back = sent and step % DELIVERY_CHECK_STEPS == 0
        served = self._engines.call("served_digests", sorted(sent), True) if reads_back else []
        evidence = Evidence(step, batch, versions, serving, scores, expected, sent, served)
        outcome = decide(evidence, self._config, self._total_steps, found)
        self.serving = outcome.serving
        if (failure := outcome.failure) is not None:
            if self._config.on_drafter_failure == "continue" and not failure.fatal:
                self.mode, outcome.failure = f"without speculation since step {step} ({failure.names})", None
                self._engines.call("set_num_speculative_tokens", 0)
        elif outcome.events and outcome.events[-1].kind in ("published", "rolled back"):
            self._swap(versions, outcome)
        kinds = {event.kind for event in outcome.events}
        metrics["drafter/published"] = float("published" in kinds)
        metrics["drafter/rolled_back"] = float("rolled back" in kinds)
        outcome.metrics |= metrics | _expected_metrics(expected, batch.speculation)
        return outcome

    def state(self) -> dict[str, Any]:
        """Everything an exact continuation needs, as plain numbers."""
        return {"serving": asdict(self.serving), "mode": self.mode}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.serving, self.mode = Publication(**state["serving"]), state["mode"]
        if self.mode is not None:
            self._engines.call("set_num_speculative_tokens", 0)

    def _swap(self, versions: Versions, outcome: Outcome) -> None:
        """Freeze the weights under the next version and send them."""
        event, expected = outcome.events[-1], outcome.expected
        rolls_back = event.kind == "rolled back"
        version = self._trainer.call("publish", self.serving.last_good if rolls_back else None)
        payload = self._trainer.call("write_payload", self._scratch / "drafter.safetensors", version)
        rates = None if expected is None else expected.rates[-1].tolist()
        try:
            outcome.swap = swap = self._engines.update_drafter(payload, version, rates)
        except WeightUpdateRefused as error:
            reason = f"version {version} refused by the engines, all keep what they serve: {error}"
            outcome.events[-1] = replace(event, kind="refused", reason=reason, numbers={})
            return
        if rolls_back:
            self._engines.call("clear_drafter_cache")  # the bad drafter may have left NaN there
            self.serving = self.serving.rolled_back(version, swap.seconds)
        else:
            self.serving = self.serving.published(version, versions.policy, swap.seconds, expected is not None)
        self._sent, outcome.events[-1] = payload.digests, replace(event, version=version)


def _expected_metrics(expected: ExpectedAcceptance | None, counts: SpeculationCounts | None) -> dict[str, float]:
    """Acceptance expected of the serving drafter on these rollouts: at the draft lengths served, and at the longest."""
    if expected is None:
        return {}
    metrics = {"rollout/expected_acceptance_length_longest": expected.longest}
    if counts is not None and expected.covers(counts.steps):
        metrics["rollout/expected_acceptance_length"] = expected.length_at(counts.steps)
        rates = expected.rates_at(counts.steps).tolist()
        metrics |= {f"rollout/expected_rate_pos_{k}": rate for k, rate in enumerate(rates, start=1)}
    return metrics
