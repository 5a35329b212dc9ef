"""One decision from the evidence of a step: publish the candidate, keep the serving drafter, roll it back, or stop.

Alarms come first, then the canary, which holds what the first steps after a publication served against what the gate
expected, then the gate, which compares the candidate with the serving drafter on the same fresh rollouts. Each candidate
is tested on its own: one without any gain is published with a probability of at most 1 - confidence, costs one swap, and
serves as well as the drafter before. Nothing here has side effects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

from cotrain.config.publish import MIN_PROMPTS, MIN_ROLLOUTS, GateConfig
from cotrain.config.schema import DrafterConfig
from cotrain.publish.acceptance import ExpectedAcceptance, expected_of, gain_of
from cotrain.publish.alarms import Alarm, check_step
from cotrain.publish.evidence import Evidence, Probation, Publication, Throughput
from cotrain.run.decisions import DrafterEvent, Kind
from cotrain.trainer.trainer import FreshScores

CANARY_STEPS = 4
"""Steps after a publication that the canary watches: a broken delivery shows in the first two."""

CANARY_ALPHA = 0.02
"""Chance that a publication which serves as expected is rolled back, over all its CANARY_STEPS: that costs two swaps
and the gain of one candidate. Step i spends alpha / 2^i of it, so that all together are wrong with probability alpha at
most, however they depend on each other, and the first steps, which matter most, have the most of it."""

CANARY_TOLERANCE = 0.05
"""Acceptance length that may be missing from what was expected: the policy moves on while the canary watches."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why. Each event says its reason in words and numbers; the last one is that of the action."""

    action: Literal["publish", "keep", "roll back", "stop"]
    serving: Publication
    """What is remembered of the serving drafter after this step, before a swap."""
    events: Sequence[DrafterEvent] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    expected: ExpectedAcceptance | None = None
    """Of the candidate that is published; None when it could not be scored."""
    alarms: Sequence[Alarm] = ()


@dataclass(frozen=True)
class Judgement:
    """What the gate or the canary found, in words and numbers."""

    kind: Kind | None
    """None while the canary goes on watching."""
    reason: str
    numbers: Mapping[str, float]
    expected: ExpectedAcceptance | None = None
    """Of the candidate."""


def decide(evidence: Evidence, config: DrafterConfig, total_steps: int, found: Sequence[Alarm] = ()) -> Decision:
    """The decision of one step. found: alarms of other checks of this step, which stop as its own do."""
    serving, events = evidence.serving, []
    alarms = [*found, *check_step(evidence, config, total_steps)]
    if alarms:
        events = [DrafterEvent(evidence.step, "alarm", serving.version, str(a), a.numbers) for a in alarms]
        return Decision("stop", serving, events, {f"alarms/{alarm.name}": 1.0 for alarm in alarms}, alarms=alarms)
    metrics: dict[str, float] = {}
    counts = evidence.counts
    if serving.probation is not None and counts is not None and serving.probation.expected.covers(counts.steps):
        probation = serving.probation.after(counts, evidence.num_prompts)
        canary = watch(probation, serving)
        metrics |= canary.numbers
        serving = replace(serving, probation=probation)
        if canary.kind is not None:
            events.append(DrafterEvent(evidence.step, canary.kind, serving.version, canary.reason, canary.numbers))
        if canary.kind == "rolled back":
            return Decision("roll back", serving, events, metrics)
        if canary.kind == "kept":
            serving = replace(serving, last_good=serving.version, probation=None)
    if evidence.scores.candidate is None or evidence.scores.rounds == serving.judged_round:
        return Decision("keep", serving, events, metrics)
    gate = judge(evidence.scores, Throughput.of(evidence.batch), config.train_every, serving.swap_seconds, config.gate)
    serving = replace(serving, judged_round=evidence.scores.rounds)
    if gate.kind == "kept back":
        serving = replace(serving, judged_on=evidence.versions.policy)
    events.append(DrafterEvent(evidence.step, gate.kind or "refused", serving.version, gate.reason, gate.numbers))
    action: Literal["publish", "keep"] = "publish" if gate.kind == "published" else "keep"
    return Decision(action, serving, events, metrics | dict(gate.numbers), gate.expected)


def watch(probation: Probation, serving: Publication) -> Judgement:
    """Compare what the steps since the publication served with what was expected at their draft lengths."""
    counts, expected = probation.counts, probation.expected
    assert counts is not None
    served, length = counts.acceptance_length, expected.at(counts.steps).value
    chance = CANARY_ALPHA / 2**probation.num_steps
    bound = expected.lowest_served(counts.steps, probation.num_prompts, CANARY_TOLERANCE, chance)
    numbers = {
        "canary/version": float(serving.version),
        "canary/served_length": served,
        "canary/expected_length": length,
        "canary/bound": bound,
        "canary/num_drafts": float(counts.num_drafts),
        "canary/step": float(probation.num_steps),
    }
    found = (
        f"version {serving.version} is served at acceptance length {served:.3f}, expected {length:.3f}, bound "
        f"{bound:.3f} after {counts.num_drafts} verification steps"
    )
    if served < bound:
        numbers["canary/roll_back_to"] = float(serving.last_good)
        return Judgement("rolled back", f"{found}: worse than expected; back to version {serving.last_good}", numbers)
    if probation.num_steps < CANARY_STEPS:
        return Judgement(None, f"{found}: watched on", numbers)
    return Judgement("kept", f"{found}: kept", numbers)


def judge(
    scores: FreshScores, throughput: Throughput, lifetime_steps: int, swap_seconds: float, config: GateConfig
) -> Judgement:
    """Compare the candidate with the serving drafter, row by row, and weigh the seconds saved against the swap.

    lifetime_steps: steps until the next candidate may replace this one. Acceptances that are not finite refuse the
    candidate, and so do too few rollouts unless config.publish_when is "always".
    """
    assert scores.candidate is not None
    numbers = {"margin": config.margin, "swap_seconds": swap_seconds}
    if broken := _not_finite(scores):
        return _judgement("refused", f"refused: {broken}", numbers)
    candidate, serving = (expected_of(one, scores.prompts) for one in (scores.candidate, scores.serving))
    num_rollouts, num_prompts = (candidate.num_rollouts, candidate.num_prompts) if candidate is not None else (0, 0)
    numbers |= {"num_rollouts": num_rollouts, "num_prompts": num_prompts}
    if candidate is None or serving is None or num_rollouts < MIN_ROLLOUTS or num_prompts < MIN_PROMPTS:
        kind, reason = _unjudged(f"{num_rollouts} rollouts of {num_prompts} prompts", config)
        return _judgement(kind, reason, numbers)
    gain = gain_of(candidate, serving)
    bound = gain.lower_bound(config.confidence)
    saved = lifetime_steps * throughput.seconds_saved(candidate, serving)
    kind, verdict = _verdict(bound, saved, swap_seconds, config)
    length, length_before = candidate.longest.value, serving.longest.value
    numbers |= {"candidate_length": length, "serving_length": length_before}
    numbers |= {"gain": gain.value, "lower_bound": bound, "seconds_saved": saved}
    saves = f"{saved:.2f} s saved before the next candidate" if isfinite(saved) else "next to nothing was drafted"
    reason = (
        f"{verdict}: acceptance length {length:.3f} against {length_before:.3f} served, gain {gain.value:+.3f}, at least "
        f"{bound:+.3f} ({config.confidence:.0%}, {num_rollouts} rollouts of {num_prompts} prompts, "
        f"{len(scores.candidate)} draft tokens), {saves}, {swap_seconds:.2f} s for the swap"
    )
    return _judgement(kind, reason, numbers, candidate)


def _unjudged(found: str, config: GateConfig) -> tuple[Kind, str]:
    missing = (
        f"{found} in this step have features of all their tokens, and {MIN_ROLLOUTS} rollouts of {MIN_PROMPTS} prompts "
        "are needed"
    )
    if config.publish_when == "always":
        return "published", f'published unjudged because publish_when = "always": {missing}'
    return "refused", f"refused: {missing}"


def _verdict(bound: float, saved: float, swap_seconds: float, config: GateConfig) -> tuple[Kind, str]:
    if config.publish_when == "always":
        return "published", 'published because publish_when = "always"'
    if bound <= config.margin:
        return "kept back", f"kept back, no gain above the margin of {config.margin:g} is certain"
    if saved <= swap_seconds:
        return "kept back", "kept back, the swap would cost more than it saves"
    return "published", "published"


def _judgement(
    kind: Kind, reason: str, numbers: Mapping[str, float], expected: ExpectedAcceptance | None = None
) -> Judgement:
    numbers = {"publish": kind == "published", **numbers}
    return Judgement(kind, reason, {f"gate/{name}": float(v) for name, v in numbers.items() if isfinite(v)}, expected)


def _not_finite(scores: FreshScores) -> str:
    """Whose acceptances are not finite, although those of the other are; empty when both know the same."""
    assert scores.candidate is not None
    candidate, serving = scores.candidate[-1], scores.serving[-1]
    for name, one, other in (("candidate", candidate, serving), ("serving drafter", serving, candidate)):
        if broken := int((one.known < other.known).sum()):
            return f"acceptances of the {name} are not finite on {broken} of {len(one.known)} rollouts"
    return ""
