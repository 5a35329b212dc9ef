"""One decision from the evidence of a step: publish the candidate, keep the serving drafter, roll it back, or stop.

Alarms come first, then the canary, which holds what the first steps after a publication served against what is expected
of the drafter on the same rollouts, then the gate, which compares the candidate with the serving drafter on rollouts
that neither was trained on. Each candidate is tested on its own: one without any gain is published with a probability
of at most 1 - confidence, costs one swap, and serves as well as the drafter before. Nothing here has side effects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

from cotrain.config.publish import MIN_PROMPTS, MIN_ROLLOUTS, GateConfig
from cotrain.config.schema import DrafterConfig
from cotrain.publish.acceptance import ExpectedAcceptance, expected_of, gain_of
from cotrain.publish.alarms import Alarm, check_acceptance, check_step
from cotrain.publish.evidence import CANARY_STEPS, Evidence, Publication, Throughput
from cotrain.run.decisions import DrafterEvent, Kind
from cotrain.trainer.trainer import FreshScores

CANARY_ALPHA = 0.02
"""Chance that a publication which serves as expected is rolled back, shared out over its CANARY_STEPS: that costs two
swaps and the gain of one candidate, so that it may happen far more often than an alarm, which ends the run."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why. Each event says its reason in words and numbers; the last one is that of the action."""

    action: Literal["publish", "keep", "roll back", "stop"]
    serving: Publication
    """What is remembered of the serving drafter after this step, before a swap."""
    events: Sequence[DrafterEvent] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    expected: ExpectedAcceptance | None = None
    """What the published candidate is expected to reach; None when it could not be scored."""
    alarms: Sequence[Alarm] = ()


@dataclass(frozen=True)
class Judgement:
    """What the gate found of a candidate, in words and numbers."""

    kind: Kind
    reason: str
    numbers: Mapping[str, float]
    expected: ExpectedAcceptance | None = None
    """What the candidate is expected to reach."""


def decide(evidence: Evidence, config: DrafterConfig, total_steps: int, found: Sequence[Alarm] = ()) -> Decision:
    """The decision of one step. found: alarms of other checks of this step, which stop as its own do."""
    serving, events = evidence.serving, list[DrafterEvent]()

    def note(kind: Kind, reason: str, numbers: Mapping[str, float]) -> None:
        events.append(DrafterEvent(evidence.step, kind, serving.version, reason, numbers))

    if alarms := [*found, *check_step(evidence, config, total_steps)]:
        for alarm in alarms:
            note("alarm", str(alarm), alarm.numbers)
        return Decision("stop", serving, events, {f"alarms/{alarm.name}": 1.0 for alarm in alarms}, alarms=alarms)
    metrics: dict[str, float] = {}
    if serving.watched:
        numbers, low = check_acceptance(evidence, config.alarms.tolerance, CANARY_ALPHA / CANARY_STEPS)
        metrics = {f"canary/{name}": value for name, value in numbers.items()}
        metrics["canary/step"] = float(CANARY_STEPS - serving.watched + 1)
        if low:
            metrics["canary/roll_back_to"] = float(serving.last_good)
            note("rolled back", f"version {serving.version}: {low[0].what}; back to {serving.last_good}", metrics)
            return Decision("roll back", serving, events, metrics)
        if numbers:
            serving = replace(serving, watched=serving.watched - 1)
        if not serving.watched:
            serving = replace(serving, last_good=serving.version)
            note("kept", f"version {serving.version} is served as expected: kept", metrics)
    if evidence.scores.candidate is None or evidence.scores.rounds == serving.judged_round:
        return Decision("keep", serving, events, metrics)
    throughput = Throughput.of(evidence.batch)
    gate = judge(evidence.scores, throughput, config.train_every, serving.swap_seconds, config.gate)
    note(gate.kind, gate.reason, gate.numbers)
    serving = replace(serving, judged_round=evidence.scores.rounds)
    if gate.kind == "kept back":
        serving = replace(serving, judged_on=evidence.versions.policy)
    action: Literal["publish", "keep"] = "publish" if gate.kind == "published" else "keep"
    return Decision(action, serving, events, metrics | dict(gate.numbers), gate.expected)


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
