"""Alarms of one step: what has failed in the drafter or its delivery to the engines, why probably, and what to do.

Two of them are statistical tests of the served acceptance against what the trainer expects of the serving drafter. A
drafter of which nothing is expected, such as a random one, raises neither.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import betabinom

from cotrain.config.publish import MIN_PROMPTS
from cotrain.config.schema import DrafterConfig
from cotrain.process.failures import RunFailure
from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.publish.evidence import Evidence
from cotrain.records import Rollout, SpeculationCounts

FALSE_ALARM_RATE = 0.01
"""Chance that the statistical alarms of a whole run fire although the drafter is healthy: a false alarm ends the run, so
that it may happen in one of a hundred. It is shared out evenly over NUM_TESTS and the steps of the run."""

NUM_TESTS = 2

ROLLOUT_CORRELATION = 0.2
"""Intraclass correlation of acceptance within a rollout that zero acceptance is tested under: drafts of one rollout
succeed and fail together. 0 would take every draft for a trial of its own (the binomial law)."""

LOWER_BOUND_ERRORS = 3.0
"""Standard errors that the expected gain is lowered by before zero acceptance is held against it."""


@dataclass(frozen=True)
class Alarm:
    """One alarm, in words and numbers."""

    name: str
    what: str
    cause: str
    remedy: str
    numbers: Mapping[str, float]
    fatal: bool = False
    """The rollouts themselves are not to be trusted; going on without speculation does not mend that."""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}. Probable cause: {self.cause}. Remedy: {self.remedy}."


class DrafterAlarm(RunFailure):
    """Alarms that stop a run."""

    def __init__(self, step: int, alarms: Sequence[Alarm]) -> None:
        lines = [f"step {step} raised {', '.join(alarm.name for alarm in alarms)}", *map(str, alarms)]
        if not any(alarm.fatal for alarm in alarms):
            lines.append('To go on without speculation when this happens, set drafter.on_drafter_failure = "continue".')
        super().__init__("\n  ".join(lines))


def check_step(evidence: Evidence, config: DrafterConfig, total_steps: int) -> list[Alarm]:
    """All alarms of one step of a run of `total_steps` steps."""
    significance = FALSE_ALARM_RATE / (total_steps * NUM_TESTS)
    found = [_wrong_version(evidence), _differing_weights(evidence), _lag(evidence, config)]
    found += [_no_draft_tokens(evidence), *_acceptance(evidence, config.alarms.tolerance, significance)]
    return [alarm for alarm in found if alarm is not None]


def collapse_probability(expected: ExpectedAcceptance, rollouts: Sequence[Rollout], steps: Sequence[int]) -> float:
    """Chance that a drafter as good as expected has not one draft token accepted in all verification steps.

    The first draft token of each step is a trial. Rollouts differ in its rate, by a beta law with the expected mean and
    ROLLOUT_CORRELATION, so that failures come together (beta-binomial law for each rollout). The mean is taken at the
    lower bound of the expectation; 1.0 when that is no gain, as that of a random drafter.
    """
    length, rates = expected.at(steps), expected.rates_at(steps)
    gain = sum(rates)
    lower = gain - LOWER_BOUND_ERRORS * length.standard_error
    if lower <= 0:
        return 1.0
    rate = min(rates[0] * lower / gain, 1.0 - 1e-9)
    concentration = 1.0 / ROLLOUT_CORRELATION - 1.0
    drafts = [r.speculation.num_drafts for r in rollouts if r.speculation is not None]
    return math.exp(betabinom.logpmf(0, drafts, rate * concentration, (1.0 - rate) * concentration).sum())


def _acceptance(evidence: Evidence, tolerance: float, significance: float) -> Iterator[Alarm]:
    """A served acceptance that chance does not explain. A drafter on probation is judged by its canary instead."""
    counts, expected = evidence.counts, evidence.expected
    if (
        evidence.serving.probation is not None
        or counts is None
        or expected is None
        or not expected.covers(counts.steps)
    ):
        return
    if counts.acceptance_length == 1.0:
        chance = collapse_probability(expected, evidence.judged_rollouts, counts.steps)
        if chance < significance:
            yield _collapsed(counts, expected, chance)
    elif expected.num_prompts >= MIN_PROMPTS:
        allowed = tolerance * (expected.at(counts.steps).value - 1.0)
        bound = expected.lowest_served(counts.steps, evidence.num_prompts, allowed, significance)
        if counts.acceptance_length < bound:
            yield _below_expected(counts, expected, bound)


def _collapsed(counts: SpeculationCounts, expected: ExpectedAcceptance, chance: float) -> Alarm:
    length = expected.at(counts.steps).value
    return Alarm(
        "acceptance_collapsed",
        f"no draft token was accepted in {counts.num_drafts} verification steps, where an acceptance length of "
        f"{length:.2f} is expected (chance {chance:.1g})",
        "the engines serve other drafter weights than the trainer's, its KV cache holds values that are not finite, "
        "it reads other target layers or positions than it was trained on, or requests are longer than its "
        "max_position_embeddings or so close to max_model_len that vLLM drafts token 0 for their whole batch",
        "publish the last good drafter again and reset the prefix cache; compare RolloutEngine.served_digests with the "
        "published ones; check drafter.model.aux_layers, and rollout.max_prompt_tokens + max_new_tokens against "
        "max_position_embeddings in the drafter's config.json",
        {"served": 1.0, "expected": length, "drafts": counts.num_drafts, "chance": chance},
    )


def _below_expected(counts: SpeculationCounts, expected: ExpectedAcceptance, bound: float) -> Alarm:
    served, length = counts.acceptance_length, expected.at(counts.steps).value
    return Alarm(
        "acceptance_below_expected",
        f"served acceptance length {served:.3f} is below {bound:.3f}, where {length:.3f} is expected",
        "training and serving differ (layers, positions, sampling, vocabulary mapping), or an older drafter is served",
        "roll back to the last good drafter version; compare rollout/acceptance_rate_pos_* with "
        "rollout/expected_rate_pos_*: position 1 points at weights and layers, later ones at the unroll; raise "
        "drafter.alarms.tolerance if the engine's number format explains the difference",
        {"served": served, "expected": length, "bound": bound, "drafts": counts.num_drafts},
    )


def _no_draft_tokens(evidence: Evidence) -> Alarm | None:
    """Draft tokens were asked for, and a later step could have verified them, but none was verified."""
    batch = evidence.batch
    asked = batch.gain is None or batch.gain.longest_draft > 0
    drafted = any(r.speculation is not None and r.speculation.num_drafts for r in batch.rollouts)
    if not asked or drafted or all(len(rollout.token_ids) <= 1 for rollout in batch.rollouts):
        return None
    return Alarm(
        "no_draft_tokens",
        f"{batch.num_generated_tokens} tokens were generated with speculation on and not one was drafted",
        "the scheduler does not read the draft length, or the engine was started without speculation",
        "look into logs/rollout_*.log for the speculative configuration; leave rollout.vllm.scheduler_cls and "
        "max_model_len to cotrain",
        {"generated_tokens": batch.num_generated_tokens},
    )


def _lag(evidence: Evidence, config: DrafterConfig) -> Alarm | None:
    limit = config.alarms.max_lag_versions or 2 * config.train_every
    lag = evidence.versions.policy - evidence.serving.judged_on
    if not config.train or lag <= limit:
        return None
    return Alarm(
        "drafter_lags",
        f"the serving drafter is {lag} policy versions behind, the limit is {limit}",
        "candidates are refused (decisions.jsonl has the reasons), or the trainer makes none",
        "mend what the reasons name and look into logs/drafter.log, or raise drafter.alarms.max_lag_versions",
        {"lag_versions": lag, "limit": limit},
    )


def _wrong_version(evidence: Evidence) -> Alarm | None:
    rollouts, believed = evidence.batch.rollouts, evidence.versions
    others = {rollout.versions for rollout in rollouts} - {believed}
    if not others:
        return None
    return Alarm(
        "wrong_version",
        f"rollouts were made with {', '.join(sorted(map(str, others)))}, the step is of {believed}",
        "an engine missed an update, or was updated while it generated",
        "resume from the last checkpoint, which starts all engines with the same weights",
        {"rollouts": sum(rollout.versions != believed for rollout in rollouts)},
        fatal=any(version.policy != believed.policy for version in others),
    )


def _differing_weights(evidence: Evidence) -> Alarm | None:
    if evidence.delivery is None:
        return None
    sent, served = evidence.delivery.sent, evidence.delivery.served
    differing = [[name for name in sent if of_engine.get(name) != sent[name]] for of_engine in served]
    engines = [engine for engine, names in enumerate(differing) if names]
    if not engines:
        return None
    names = sorted({name for of_engine in differing for name in of_engine})
    return Alarm(
        "weights_differ",
        f"engines {engines} serve other drafter tensors than were sent: {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        "an update was lost (sleep and wake, a reload from the first checkpoint), or another module's update "
        "overwrote tensors shared between target and drafter",
        "resume from the last checkpoint; if it comes back, take sleeping and reloading out of the engine",
        {"tensors": len(names), "engines": len(engines)},
    )
