"""Decide from the evidence of a step: publish the candidate, keep the serving drafter, roll it back, or stop the run.

Alarms come first, then the canary, then the gate (docs/internals/publishing.md). Nothing here has side effects.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cotrain.config.schema import MIN_PROMPTS, MIN_ROLLOUTS, DrafterConfig
from cotrain.publish.acceptance import ExpectedAcceptance, expected_of, gain_of
from cotrain.publish.alarms import Alarm, DrafterAlarm, check_acceptance, check_step
from cotrain.publish.evidence import CANARY_STEPS, Evidence, Publication, enough
from cotrain.records import RolloutBatch, SwapReport

CONFIDENCE = 0.95  # of the lower bound of each candidate's gain; a publication without any gain costs only a swap
MARGIN = 0.02  # acceptance length that this bound must exceed; a smaller gain would not show in the speed

Kind = Literal["published", "kept back", "refused", "rolled back", "kept", "alarm", "started"]


@dataclass(frozen=True)
class DrafterEvent:
    """One decision about the drafter, as decisions.jsonl holds it."""

    step: int
    kind: Kind  # a candidate is published, kept back or refused; the canary rolls it back or keeps it; an alarm; or the first weights
    version: int  # the drafter that the engines serve from the next step on
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_bad_news(self) -> bool:
        """Whether a person would want to read it in full."""
        return self.kind in ("refused", "rolled back", "alarm")

    def in_short(self) -> str:
        """Return the event in short for the end of a step line; empty if the line shows it anyway."""
        if self.kind in ("published", "kept"):
            return ""
        return "drafter rolled back" if self.kind == "rolled back" else f"drafter {self.reason.partition(':')[0]}"


@dataclass
class Outcome:
    """What is decided about the drafter, and why."""

    serving: Publication  # the record of the serving drafter after this step, before a swap
    events: list[DrafterEvent] = field(default_factory=list)
    """Reasons in words and numbers. The last one says whether the candidate or the last good version is to serve."""
    metrics: dict[str, float] = field(default_factory=dict)
    expected: ExpectedAcceptance | None = None  # what a published candidate should reach; None if it was not scored
    failure: DrafterAlarm | None = None  # to be raised once the events are recorded
    swap: SwapReport | None = None  # the swap, when there was one: the publisher fills it in
    trains: bool = False  # whether the drafter is to be trained on this step's rollouts
    waits: str = ""  # why it is not, where that is a decision
    lengths: tuple[float, float] | None = None
    """Acceptance length of the serving drafter and of the candidate, if they were compared."""

    @property
    def promised(self) -> dict[str, float]:
        """What the published candidate is expected to reach, as metrics for the registry."""
        if self.expected is None:
            return {}
        metrics = {f"drafter/acceptance_rate_pos_{k}": rate for k, rate in enumerate(self.expected.rates[-1], start=1)}
        return metrics | {"drafter/expected_acceptance_length": self.expected.longest}

    def note(self, evidence: Evidence, kind: Kind, reason: str, numbers: Mapping[str, float]) -> None:
        """Add an event, and its numbers to the metrics. A candidate that is published, kept back or refused has been judged."""
        self.events.append(DrafterEvent(evidence.step, kind, evidence.versions.drafter, reason, numbers))
        self.metrics |= numbers
        if kind in ("published", "kept back", "refused"):
            unjudged = 0 if kind == "kept back" else self.serving.unjudged
            self.serving = replace(self.serving, judged_update=evidence.scores.updates, unjudged=unjudged)


def alarmed(step: int, version: int, serving: Publication, alarms: Sequence[Alarm]) -> Outcome:
    """Return the outcome of a step with alarms: whatever else there is to decide waits."""
    events = [DrafterEvent(step, "alarm", version, str(alarm), alarm.numbers) for alarm in alarms]
    return Outcome(serving, events, {f"alarms/{a.name}": 1.0 for a in alarms}, failure=DrafterAlarm(step, alarms))


def decide(evidence: Evidence, config: DrafterConfig, total_steps: int) -> Outcome:
    """Make the decision of one step of a run of `total_steps` steps."""
    step, version, serving, scores = evidence.step, evidence.versions.drafter, evidence.serving, evidence.scores
    if alarms := check_step(evidence, config, total_steps):
        return alarmed(step, version, serving, alarms)
    outcome = Outcome(serving, trains=config.train and step % config.train_every == 0)
    if serving.watched:
        numbers, low = check_acceptance(evidence, config, total_steps)
        outcome.metrics = {f"canary/{name}": value for name, value in numbers.items()}
        outcome.metrics["canary/step"] = float(CANARY_STEPS - serving.watched + 1)
        if low:
            outcome.metrics["canary/roll_back_to"] = float(serving.last_good)
            reason = f"version {version}: {low.what}; back to {serving.last_good}"
            outcome.note(evidence, "rolled back", reason, dict(outcome.metrics))
            return outcome
        serving = replace(serving, watched=serving.watched - bool(numbers))
        if not serving.watched:
            serving = replace(serving, last_good=version)
            outcome.note(evidence, "kept", f"version {version} is served as expected: kept", dict(outcome.metrics))
    draftable = [rollout.prompt_id for rollout in evidence.batch.rollouts if len(rollout.token_ids) > 1]
    unjudged = serving.unjudged + (enough(scores.prompts) or enough(draftable))
    outcome.serving = replace(serving, unjudged=unjudged, served=serving.served + 1)
    judge(evidence, config, outcome, max(1, total_steps - step))
    return outcome


def judge(evidence: Evidence, config: DrafterConfig, outcome: Outcome, left: int) -> None:
    """Compare the candidate, if there is one, with the serving drafter on the same rollouts, and add the verdict to `outcome`.

    It is published if its gain is certain and saves more seconds than the swap takes. left: steps of the run.
    It is refused if acceptances are not finite, and waits for more rollouts if there are too few, unless drafter.gate.publish_when
    is "always".
    """
    scores, batch = evidence.scores, evidence.batch
    if scores.candidate is None:
        return
    ours, theirs = scores.candidate[-1].known, scores.serving[-1].known
    if broken := int((ours != theirs).sum()):
        name = "candidate" if ours.sum() < theirs.sum() else "serving drafter"
        reason = f"refused: acceptances of the {name} are not finite on {broken} of {len(ours)} rollouts"
        outcome.note(evidence, "refused", reason, {"gate/publish": 0.0})
        return
    candidate, serving = (expected_of(one, scores.prompts) for one in (scores.candidate, scores.serving))
    num_rollouts, num_prompts = (candidate.num_rollouts, candidate.num_prompts) if candidate is not None else (0, 0)
    judged_on = f"{num_rollouts} rollouts of {num_prompts} prompts"
    kind: Kind = "kept back"
    numbers = {"gate/num_rollouts": float(num_rollouts), "gate/num_prompts": float(num_prompts)}
    always = config.gate.publish_when == "always"
    because = ' because publish_when = "always"' if always else ""
    if candidate is None or serving is None or num_rollouts < MIN_ROLLOUTS or num_prompts < MIN_PROMPTS:
        outcome.metrics |= numbers
        if always or enough(scores.prompts):
            kind = "published" if always else "refused"
            reason = f"{judged_on} could be scored, and {MIN_ROLLOUTS} rollouts of {MIN_PROMPTS} prompts are needed"
            outcome.note(evidence, kind, f"{kind}{because}: {reason}", numbers | {"gate/publish": float(always)})
        return
    gain, bound = gain_of(candidate, serving, CONFIDENCE)
    outcome.lengths = serving.longest, candidate.longest
    # Where generation overlaps with learning, only the exposed share of the engines' time holds up the run.
    # A publication is taken to serve as long as the one before has, and no longer than the run.
    steps = min(max(outcome.serving.served, config.train_every, scores.steps), left)
    saved = steps * (batch.seconds * batch.exposed - seconds_with(batch, serving, candidate.lengths))
    cost = evidence.serving.swap_seconds * batch.exposed
    if not always and bound <= MARGIN:
        because = f", no gain above the margin of {MARGIN:g} is certain"
    elif not always and saved <= cost:
        because = ", the swap would cost more than it saves"
    else:
        kind, outcome.expected = "published", candidate
    reason = (
        f"{kind}{because}: acceptance length {candidate.longest:.3f} against {serving.longest:.3f} served, gain "
        f"{gain:+.3f}, at least {bound:+.3f} ({CONFIDENCE:.0%}, {judged_on}, {len(scores.candidate)} draft tokens), "
        f"{saved:.2f} s saved in {steps} steps, {cost:.2f} s for the swap"
    )
    if batch.exposed < 1:
        reason += f"; {batch.exposed:.0%} of the generation time is waited for"
    numbers |= {"gate/publish": float(kind == "published"), "gate/gain": gain, "gate/lower_bound": bound}
    numbers |= {"gate/candidate_length": candidate.longest, "gate/serving_length": serving.longest}
    outcome.note(evidence, kind, reason, numbers | {"gate/seconds_saved": saved, "gate/swap_seconds": cost})


def seconds_with(batch: RolloutBatch, serving: ExpectedAcceptance, lengths: NDArray[np.float64]) -> float:
    """Return the seconds of generation in a step like this one, with a drafter of these acceptance lengths [K + 1] at draft lengths 0
    to K in place of the serving one, each at its fastest draft lengths.

    Only seconds in which the learner waits for rollouts count. The fastest lengths, 0 included, follow from the engines'
    measured step costs. Without such costs, every step is taken to draft K tokens.
    """
    costs = batch.gain.seconds_at if batch.gain is not None else []
    table = np.array(costs or [[np.inf] * len(serving.rates) + [1.0]])[:, : len(serving.lengths)]
    before, after = ((table / of_drafter).min(axis=1).sum() for of_drafter in (serving.lengths, lengths))
    return float(batch.seconds * batch.exposed * after / before)


def generation_at(batch: RolloutBatch, serving: ExpectedAcceptance) -> Callable[[float], float]:
    """Return the seconds of generation in a step like this one, as a function of the acceptance length with K draft tokens.

    Acceptance lengths with fewer draft tokens are taken to lie between 1 and it as those of the serving drafter do.
    """
    most = np.arange(1.0, len(serving.lengths) + 1)
    shape = (serving.lengths - 1) / (serving.longest - 1) if serving.longest > 1.001 else (most - 1) / (len(most) - 1)
    return lambda length: seconds_with(batch, serving, np.minimum(1 + (length - 1) * shape, most))
