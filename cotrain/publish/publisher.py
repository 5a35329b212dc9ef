"""The drafter's part of a step: score it, decide on it, and send the engines what was decided.

A rollout is test data first and training data from then on. Before anything is trained on the rollouts of a step, the
serving drafter and the candidate (the trainer's drafter as the previous step left it) are scored on them. The swap follows
at once, while the policy learns, so that what is published is what was scored.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cotrain.acceptance_stats import counts_of, last_segments
from cotrain.config.schema import DrafterConfig
from cotrain.publish.acceptance import expected_of
from cotrain.publish.alarms import Alarm
from cotrain.publish.decision import Outcome, alarmed, decide, generation_at
from cotrain.publish.evidence import Evidence, FreshScores, Publication
from cotrain.publish.investment import Investment, Prices, Spent
from cotrain.records import RolloutBatch, SwapReport, WeightPayload, WeightUpdateRefused
from cotrain.weights.versions import CurrentWeights

DELIVERY_CHECK_STEPS = 10
"""Steps between read-backs of the served drafter weights, besides the read-back of each update. What is lost in between (sleep,
a reload) costs acceptance only, and a read-back takes about as long as a swap."""

DRAFTER_FILE = "drafter.safetensors"  # brings weights to the engines, in the shared memory of the trainer's node


@dataclass(frozen=True)
class PublisherSpec:
    drafter: DrafterConfig
    total_steps: int  # steps of the run, over which the probability of a false alarm is split
    recomputes: bool = True  # whether a policy update in the middle of a rollout recomputes the KV cache of its text


class Engines(Protocol):
    """All engines that the drafter serves; see RolloutEngines."""

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]: ...
    def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None: ...
    def clear_drafter_cache(self) -> None: ...
    def update_drafter(
        self, payload: WeightPayload, version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport: ...


class Trainer(Protocol):
    """The trainer of the drafter; see DrafterTrainer."""

    def take_in(
        self, features: list[Any], serving: int, keep: Collection[int], judged: int
    ) -> tuple[FreshScores, dict[str, float]]: ...
    def publish(self, weights_of: int | None = None) -> int: ...
    def write_payload(self, path: Path, version: int) -> WeightPayload: ...


class Publisher:
    """Decides after each step which drafter serves, and remembers what the next decision needs."""

    def __init__(
        self, spec: PublisherSpec, trainer: Trainer, engines: Engines, scratch: Path, current: CurrentWeights
    ) -> None:
        """scratch: a folder for weights on their way. current: what the engines serve."""
        self._spec, self._trainer, self._engines = spec, trainer, engines
        self._scratch, self._current = scratch, current
        self.serving = Publication(last_good=current.versions.drafter)
        self._investment = Investment()
        self.mode: str | None = None  # note on every step line once alarms have switched speculation off; None before

    def heed(self, step: int, alarms: Sequence[Alarm]) -> Outcome:
        """Decide on alarms of another check. If so configured, the run continues without speculation after one that is not fatal;
        otherwise the caller must raise Outcome.failure."""
        return self._switch_off(alarmed(step, self._current.versions.drafter, self.serving, alarms))

    def evaluate(self, step: int, batch: RolloutBatch, spent: Spent | None = None) -> Outcome:
        """Decide on the rollouts that have ended since the last call, and swap. Call it before training on them.

        Alarms are treated as by `heed`. If an engine refuses a drafter, all keep the one they have. spent: what training costs the
        run; None trains whether it pays or not.
        """
        serving, spec, current, versions = self.serving, self._spec, self._current, self._current.versions
        batch = replace(batch, rollouts=last_segments(batch.rollouts, spec.recomputes))
        keep = {versions.drafter, serving.last_good}
        scores, metrics = self._trainer.take_in(batch.features, versions.drafter, keep, serving.judged_update)
        # Only these rollouts were drafted by the serving drafter, so the expectation must be for the same ones.
        served_by = np.array(scores.served_by) == versions.drafter
        expected = expected_of(scores.serving, scores.prompts, served_by)
        sent = current.drafter.digests if current.drafter else {}
        reads_back = sent and step % DELIVERY_CHECK_STEPS == 0
        served = self._engines.served_digests(sorted(sent), True) if reads_back else []
        gathered = scores.gathered or scores
        evidence = Evidence(step, batch, versions, serving, gathered, expected, sent, served, current.earlier)
        outcome = decide(evidence, spec.drafter, spec.total_steps)
        self.serving = outcome.serving
        if outcome.failure is not None:
            self._switch_off(outcome)
        elif outcome.events and outcome.events[-1].kind in ("published", "rolled back"):
            self._swap(outcome)
        if spent is not None and expected is not None and spec.drafter.train and outcome.failure is None:
            self._invest(evidence, outcome, spent)
        kinds = {event.kind for event in outcome.events}
        metrics["drafter/published"] = float("published" in kinds)
        metrics["drafter/rolled_back"] = float("rolled back" in kinds)
        outcome.metrics |= metrics | ({} if expected is None else expected.metrics(counts_of(batch.rollouts).steps))
        return outcome

    def _invest(self, evidence: Evidence, outcome: Outcome, spent: Spent) -> None:
        """Note what the step showed, and decide whether a round of training pays, if one is due and drafter.train_when asks for it."""
        assert evidence.expected is not None
        investment, served = self._investment, evidence.expected
        before, candidate = outcome.lengths or (served.longest, None)
        updates = evidence.scores.updates - evidence.serving.judged_update
        investment.observe(before, candidate, updates / self._spec.drafter.updates_per_step)
        if outcome.swap is not None and candidate is not None:
            investment.published()
        generation = generation_at(evidence.batch, served)
        prices = Prices(generation, self.serving.swap_seconds * evidence.batch.exposed, spent)
        verdict = investment.decide(prices, self._spec.total_steps - evidence.step)
        outcome.metrics |= {"time/training_cost_s": spent.last, "time/training_return_s": verdict.returned}
        known = {"time/round_costs_s": verdict.costs, "time/round_saves_s": verdict.saves}
        outcome.metrics |= {name: seconds for name, seconds in known.items() if seconds is not None}
        if outcome.trains and self._spec.drafter.train_when == "pays" and not verdict.trains:
            outcome.trains, outcome.waits = False, f"drafter waits: {verdict.reason}"
            self.serving = replace(self.serving, unjudged=0)

    def take_back(self, outcome: Outcome) -> None:
        """Continue from the drafter that served before a swap, which an engine has refused since `evaluate` returned."""
        self.serving = outcome.serving

    def state(self) -> dict[str, Any]:
        """Everything an exact continuation needs, as plain numbers."""
        return {"serving": asdict(self.serving), "mode": self.mode, "investment": asdict(self._investment)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.serving, self.mode = Publication(**state["serving"]), state["mode"]
        self._investment = Investment(**state["investment"])
        if self.mode is not None:
            self._engines.set_num_speculative_tokens(0)

    def _switch_off(self, outcome: Outcome) -> Outcome:
        """End speculation, and the failure with it, if the run is to continue."""
        failure = outcome.failure
        if failure is not None and self._spec.drafter.on_drafter_failure == "continue" and not failure.fatal:
            self.mode = f"without speculation since step {outcome.events[0].step} ({failure.names})"
            self._engines.set_num_speculative_tokens(0)
            outcome.failure = None
        return outcome

    def _swap(self, outcome: Outcome) -> None:
        """Freeze the weights under the next version number and send them to the engines."""
        event, expected, before = outcome.events[-1], outcome.expected, self._current.versions.drafter
        rolls_back = event.kind == "rolled back"
        version = self._trainer.publish(self.serving.last_good if rolls_back else None)
        payload = self._trainer.write_payload(self._scratch / DRAFTER_FILE, version)
        rates = None if expected is None else expected.rates[-1].tolist()
        try:
            outcome.swap = swap = self._engines.update_drafter(payload, version, rates)
        except WeightUpdateRefused as error:
            reason = f"version {version} refused by the engines, all keep what they serve: {error}"
            outcome.events[-1] = replace(event, kind="refused", reason=reason, numbers={})
            return
        if rolls_back:
            self._engines.clear_drafter_cache()  # the bad drafter may have left NaN there
            self.serving = self.serving.rolled_back(version, swap.seconds)
        else:
            self.serving = self.serving.published(before, version, swap.seconds, expected is not None)
        outcome.events[-1] = replace(event, version=version)
