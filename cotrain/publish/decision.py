"""Decide from the evidence of a step: publish the candidate, keep the serving drafter, roll it back, or stop the run.

Alarms come first, then the canary, then the gate (docs/internals/publishing.md). Nothing here has side effects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cotrain.acceptance_stats import share_from_history
from cotrain.config.schema import MIN_PROMPTS, MIN_ROLLOUTS, DrafterConfig, GateConfig
from cotrain.publish.acceptance import ExpectedAcceptance, expected_of, gain_of
from cotrain.publish.alarms import Alarm, DrafterAlarm, check_acceptance, check_step
from cotrain.publish.evidence import CANARY_STEPS, Evidence, Publication
from cotrain.records import RolloutBatch, SwapReport
from cotrain.run.rows import DrafterEvent, Kind
from cotrain.trainer.trainer import FreshScores, enough

CANARY_ALPHA = 0.02
"""Probability that a publication which serves as expected is rolled back, split over its CANARY_STEPS. That costs two swaps and
the gain of one candidate, so it may happen far more often than a false alarm, which ends the run."""

CONFIDENCE = 0.95
"""Confidence of the lower bound of each candidate's gain. A publication without any gain costs only a swap."""

MARGIN = 0.02
"""Acceptance length that the lower bound of the gain must exceed; a smaller gain would not show in the speed."""


@dataclass
class Outcome:
    """What a step does about the drafter, and why."""

    serving: Publication
    """The record of the serving drafter after this step, before a swap."""
    events: list[DrafterEvent]
    """Reasons in words and numbers. The last one says whether the candidate or the last good version is to serve."""
    metrics: dict[str, float]
    expected: ExpectedAcceptance | None = None
    """What the published candidate is expected to reach; None when it could not be scored."""
    failure: DrafterAlarm | None = None
    """To be raised once the events are recorded."""
    swap: SwapReport | None = None
    """The swap, when there was one: the publisher fills it in."""
    trains: bool = False
    """Whether the drafter is to be trained on this step's rollouts."""

    @property
    def promised(self) -> dict[str, float]:
        """What the published candidate is expected to reach, as metrics for the registry."""
        if self.expected is None:
            return {}
        metrics = {f"drafter/acceptance_rate_pos_{k}": rate for k, rate in enumerate(self.expected.rates[-1], start=1)}
        return metrics | {"drafter/expected_acceptance_length": self.expected.longest}


class Judgement(NamedTuple):
    """What the gate found of a candidate, in words and numbers."""

    kind: Kind | None
    """None while there is too little to judge by."""
    reason: str
    numbers: dict[str, float]
    expected: ExpectedAcceptance | None = None
    """What the candidate is expected to reach."""


def alarmed(step: int, version: int, serving: Publication, alarms: Sequence[Alarm]) -> Outcome:
    """Return the outcome of a step with alarms: whatever else there is to decide waits."""
    events = [DrafterEvent(step, "alarm", version, str(alarm), alarm.numbers) for alarm in alarms]
    return Outcome(serving, events, {f"alarms/{a.name}": 1.0 for a in alarms}, failure=DrafterAlarm(step, alarms))


def decide(evidence: Evidence, config: DrafterConfig, total_steps: int) -> Outcome:
    """Make the decision of one step."""
    step, serving, scores = evidence.step, evidence.serving, evidence.scores.gathered or evidence.scores
    version = evidence.versions.drafter
    outcome = Outcome(serving, [], {}, trains=config.train and step % config.train_every == 0)

    def note(kind: Kind, reason: str, numbers: Mapping[str, float]) -> None:
        outcome.events.append(DrafterEvent(step, kind, version, reason, numbers))

    if alarms := check_step(evidence, config, total_steps):
        return alarmed(step, version, serving, alarms)
    if serving.watched:
        numbers, low = check_acceptance(evidence, config.alarms.tolerance, CANARY_ALPHA / CANARY_STEPS)
        outcome.metrics = {f"canary/{name}": value for name, value in numbers.items()}
        outcome.metrics["canary/step"] = float(CANARY_STEPS - serving.watched + 1)
        if low:
            outcome.metrics["canary/roll_back_to"] = float(serving.last_good)
            reason = f"version {version}: {low.what}; back to {serving.last_good}"
            note("rolled back", reason, outcome.metrics)
            return outcome
        if numbers:
            serving = replace(serving, watched=serving.watched - 1)
        if not serving.watched:
            serving = replace(serving, last_good=version)
            note("kept", f"version {version} is served as expected: kept", outcome.metrics)
    draftable = [rollout.prompt_id for rollout in evidence.batch.rollouts if len(rollout.token_ids) > 1]
    unjudged = serving.unjudged + (scores.suffice or enough(draftable))
    if scores.candidate is not None:
        lifetime = max(config.train_every, scores.steps)
        gate = judge(scores, evidence.batch, lifetime, serving.swap_seconds, config.gate)
        outcome.metrics, outcome.expected = outcome.metrics | gate.numbers, gate.expected
        if gate.kind is not None:
            note(gate.kind, gate.reason, gate.numbers)
            unjudged = 0 if gate.kind == "kept back" else unjudged
            serving = replace(serving, judged_update=scores.updates)
    outcome.serving = replace(serving, unjudged=unjudged)
    return outcome


def judge(
    scores: FreshScores, batch: RolloutBatch, lifetime_steps: int, swap_seconds: float, config: GateConfig
) -> Judgement:
    """Compare the candidate with the serving drafter on the same rollouts, and weigh the seconds saved against the swap.

    lifetime_steps: steps until the next candidate may replace this one. A candidate is refused if acceptances are not finite.
    It waits for more rollouts if there are too few, unless config.publish_when is "always".
    """
    assert scores.candidate is not None
    ours, theirs = scores.candidate[-1].known, scores.serving[-1].known
    if broken := int((ours != theirs).sum()):
        name = "candidate" if ours.sum() < theirs.sum() else "serving drafter"
        reason = f"refused: acceptances of the {name} are not finite on {broken} of {len(ours)} rollouts"
        return Judgement("refused", reason, {"gate/publish": 0.0})
    candidate, serving = (expected_of(one, scores.prompts) for one in (scores.candidate, scores.serving))
    num_rollouts, num_prompts = (candidate.num_rollouts, candidate.num_prompts) if candidate is not None else (0, 0)
    judged_on = f"{num_rollouts} rollouts of {num_prompts} prompts"
    always = config.publish_when == "always"
    kind: Kind | None = "published" if always else "refused" if scores.suffice else None
    because = ' because publish_when = "always"' if always else ""
    if candidate is None or serving is None or num_rollouts < MIN_ROLLOUTS or num_prompts < MIN_PROMPTS:
        needed = f"and {MIN_ROLLOUTS} rollouts of {MIN_PROMPTS} prompts are needed to judge"
        reason = f"{kind or 'waits'}{because}: {judged_on} could be scored, {needed}"
        found = {} if kind is None else {"gate/publish": float(always)}
        return Judgement(kind, reason, found | {"gate/num_rollouts": num_rollouts, "gate/num_prompts": num_prompts})
    gain, bound = gain_of(candidate, serving, CONFIDENCE)
    # Where generation overlaps with learning, only the exposed share of the engines' time holds up the run.
    # What is drafted from history gains nothing from a better drafter.
    share = 1 - share_from_history(batch.rollouts)
    saved, cost = lifetime_steps * share * seconds_saved(batch, candidate, serving), swap_seconds * batch.exposed
    if not always and bound <= MARGIN:
        kind, because = "kept back", f", no gain above the margin of {MARGIN:g} is certain"
    elif not always and saved <= cost:
        kind, because = "kept back", ", the swap would cost more than it saves"
    else:
        kind = "published"
    reason = (
        f"{kind}{because}: acceptance length {candidate.longest:.3f} against {serving.longest:.3f} served, gain "
        f"{gain:+.3f}, at least {bound:+.3f} ({CONFIDENCE:.0%}, {judged_on}, {len(scores.candidate)} draft tokens), "
        f"{saved:.2f} s saved before the next candidate, {cost:.2f} s for the swap"
    )
    if batch.exposed < 1:
        reason += f"; {batch.exposed:.0%} of the generation time is waited for"
    numbers = {"publish": kind == "published", "candidate_length": candidate.longest, "serving_length": serving.longest}
    numbers |= {"gain": gain, "lower_bound": bound, "seconds_saved": saved, "swap_seconds": cost}
    numbers |= {"num_rollouts": num_rollouts, "num_prompts": num_prompts}
    return Judgement(kind, reason, {f"gate/{name}": float(value) for name, value in numbers.items()}, candidate)


def seconds_saved(batch: RolloutBatch, candidate: ExpectedAcceptance, serving: ExpectedAcceptance) -> float:
    """Return the seconds that the candidate would save in a step like this one, each drafter at its own fastest draft lengths.

    Only seconds in which the learner waits for rollouts count. The fastest lengths, 0 included, follow from the engines'
    measured step costs. Without such costs, every step is taken to draft K tokens.
    """
    costs = batch.gain.seconds_at if batch.gain is not None else []
    table = np.array(costs or [[np.inf] * len(serving.rates) + [1.0]])[:, : len(serving.lengths)]
    before, after = ((table / drafter.lengths).min(axis=1).sum() for drafter in (serving, candidate))
    return float(batch.seconds * batch.exposed * (1 - after / before))
