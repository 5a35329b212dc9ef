"""Alarms of one step: has the drafter, or its delivery to the engines, failed, why probably, and what to do.

Two of them are statistical tests of the served acceptance against what the trainer expects of the serving drafter. A
drafter of which nothing is expected, such as a random one, raises neither. Pure functions of a step's record.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import betabinom

from cotrain.config.alarm import AlarmConfig
from cotrain.config.schema import DrafterConfig
from cotrain.process.failures import RunFailure
from cotrain.publish.expected import ExpectedAcceptance, noise_bound, served_length
from cotrain.records import Rollout, SpeculationCounts, Versions
from cotrain.rollout.acceptance_stats import total_counts

NUM_TESTS = 2
"""Statistical alarms of a step, among which its false-alarm rate is shared."""

ROLLOUT_CORRELATION = 0.2
"""Intraclass correlation of acceptance within a rollout that zero acceptance is tested under: drafts of one rollout
succeed and fail together. 0 would take every draft for a trial of its own (the binomial law)."""

LOWER_BOUND_ERRORS = 3.0
"""Standard errors that the expected gain is lowered by before zero acceptance is held against it."""

MIN_PROMPTS = 4
"""Prompts, held out and served, from which noise is taken. With two, the test fires 6 to 50 times too often in its far
tail (degrees of freedom are then themselves a guess); from four on less often than stated, at the default tolerance."""


@dataclass(frozen=True)
class Delivery:
    """Digests of the tensors sent for one role, and of those that each engine serves."""

    role: Literal["policy", "drafter"]
    sent: Mapping[str, str]
    served: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class StepRecord:
    """What the alarms look at. `versions` are those the controller believes were served."""

    rollouts: Sequence[Rollout]
    versions: Versions
    draft_length: int
    """Longest draft of this step that an engine could verify; 0 when speculation was off all the time."""
    expected: ExpectedAcceptance | None
    """Of the serving drafter, on rollouts it was not trained on. None while there are none, or while a canary watches
    it: then acceptance is not judged here."""
    lag_versions: int | None = None
    """Policy versions from the rollouts on which the serving drafter was last judged to those of this step. None for a
    frozen drafter."""
    deliveries: Sequence[Delivery] = ()


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
        self.alarms = list(alarms)
        lines = [f"step {step} raised {', '.join(alarm.name for alarm in alarms)}", *map(str, alarms)]
        if not any(alarm.fatal for alarm in alarms):
            lines.append('To go on without speculation when this happens, set drafter.on_drafter_failure = "continue".')
        super().__init__("\n  ".join(lines))


def respond(step: int, alarms: Sequence[Alarm], on_drafter_failure: Literal["stop", "continue"]) -> str | None:
    """None without alarms. "stop" raises DrafterAlarm, and so does a fatal alarm; else the mode for every step line."""
    if not alarms:
        return None
    if on_drafter_failure == "stop" or any(alarm.fatal for alarm in alarms):
        raise DrafterAlarm(step, alarms)
    return f"without speculation since step {step} ({', '.join(alarm.name for alarm in alarms)})"


def check_step(record: StepRecord, config: AlarmConfig, lag_limit: int, steps: int) -> list[Alarm]:
    """All alarms of one step of a run of `steps` steps; `lag_limit` as the function of that name gives it."""
    alarms = [*_wrong_versions(record), *_differing_weights(record), *_lag(record, lag_limit)]
    if record.draft_length > 0:
        alarms += _acceptance(record, config, config.false_alarm_rate / (steps * NUM_TESTS))
    return alarms


def lag_limit(config: AlarmConfig, drafter: DrafterConfig) -> int:
    """Most policy versions that the serving drafter may be behind."""
    return config.max_lag_versions or 2 * drafter.train_every * drafter.publish_every


def shortfall_bound(
    expected: ExpectedAcceptance, rollouts: Sequence[Rollout], tolerance: float, significance: float
) -> float:
    """A healthy drafter is served below this length with probability `significance` at most.

    (1 - tolerance) of the expected gain, less the noise of both lengths between prompts (Welch's t). Minus infinity
    with fewer than MIN_PROMPTS prompts on either side, whose noise is not known.
    """
    counts, served = total_counts(r.speculation for r in rollouts), served_length(rollouts)
    if counts is None or served is None or min(served.num_groups, expected.num_groups) < MIN_PROMPTS:
        return -math.inf
    length = expected.at(counts.steps)
    return 1.0 + (1.0 - tolerance) * (length.value - 1.0) - noise_bound(length, served, significance)


def collapse_probability(expected: ExpectedAcceptance, rollouts: Sequence[Rollout]) -> float:
    """Chance that a drafter as good as expected has not one draft token accepted in all these drafts.

    The first draft token of each verification step is a trial. Rollouts differ in its rate, by a beta law with the
    expected mean and ROLLOUT_CORRELATION, so that failures come together (beta-binomial law for each rollout). The
    mean is taken at the lower bound of the expectation. 1.0 when that is no gain, as of a random drafter, and without
    drafts.
    """
    counts = total_counts(r.speculation for r in rollouts)
    if counts is None or not counts.num_drafts:
        return 1.0
    length, rates = expected.at(counts.steps), expected.rates_at(counts.steps)
    gain = sum(rates)
    lower = gain - LOWER_BOUND_ERRORS * length.standard_error
    if lower <= 0:
        return 1.0
    rate = min(rates[0] * lower / gain, 1.0 - 1e-9)
    concentration = 1.0 / ROLLOUT_CORRELATION - 1.0
    drafts = [r.speculation.num_drafts for r in rollouts if r.speculation is not None]
    return math.exp(betabinom.logpmf(0, drafts, rate * concentration, (1.0 - rate) * concentration).sum())


def _acceptance(record: StepRecord, config: AlarmConfig, significance: float) -> Iterator[Alarm]:
    if not any(r.speculation is not None and r.speculation.num_drafts for r in record.rollouts):
        if any(len(rollout.token_ids) > 1 for rollout in record.rollouts):
            yield _no_draft_tokens(record)
        return
    rollouts = [r for r in record.rollouts if r.drafted_throughout]
    counts, expected = total_counts(r.speculation for r in rollouts), record.expected
    if expected is None or counts is None or not counts.num_drafts:
        return
    if counts.acceptance_length == 1.0:
        if (chance := collapse_probability(expected, rollouts)) < significance:
            yield _collapsed(counts, expected, chance)
    else:
        bound = shortfall_bound(expected, rollouts, config.tolerance, significance)
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
        "training and serving differ (layers, positions, sampling, vocabulary mapping), an older drafter is served, or "
        "the policy has moved far since the expectation was computed",
        "roll back to the last good drafter version; compare rollout/acceptance_rate_pos_* with "
        "rollout/expected_rate_pos_*: position 1 points at weights and layers, later ones at the unroll; raise "
        "drafter.alarms.tolerance if the policy moves this fast on purpose",
        {"served": served, "expected": length, "bound": bound, "drafts": counts.num_drafts},
    )


def _no_draft_tokens(record: StepRecord) -> Alarm:
    tokens = sum(len(rollout.token_ids) for rollout in record.rollouts)
    return Alarm(
        "no_draft_tokens",
        f"{tokens} tokens were generated with draft length {record.draft_length} and not one was drafted",
        "the scheduler does not read the draft length, or the engine was started without speculation",
        "look into logs/rollout_*.log for the speculative configuration; leave rollout.vllm.scheduler_cls and "
        "max_model_len to cotrain",
        {"generated_tokens": tokens, "draft_length": record.draft_length},
    )


def _lag(record: StepRecord, limit: int) -> Iterator[Alarm]:
    if record.lag_versions is not None and record.lag_versions > limit:
        yield Alarm(
            "drafter_lags",
            f"the serving drafter is {record.lag_versions} policy versions behind, the limit is {limit}",
            "candidates are refused (decisions.jsonl has the reasons), or drafter.publish_every offers them too seldom",
            "mend what the reasons name and look into logs/drafter.log; lower drafter.publish_every, or raise "
            "drafter.alarms.max_lag_versions",
            {"lag_versions": record.lag_versions, "limit": limit},
        )


def _wrong_versions(record: StepRecord) -> Iterator[Alarm]:
    others = {rollout.versions for rollout in record.rollouts} - {record.versions}
    if others:
        yield Alarm(
            "wrong_version",
            f"rollouts were made with {', '.join(sorted(map(str, others)))}, the step is of {record.versions}",
            "an engine missed an update, or was updated while it generated",
            "resume from the last checkpoint, which starts all engines with the same weights",
            {"rollouts": sum(rollout.versions != record.versions for rollout in record.rollouts)},
            fatal=any(version.policy != record.versions.policy for version in others),
        )


def _differing_weights(record: StepRecord) -> Iterator[Alarm]:
    for delivery in record.deliveries:
        differing = [
            [name for name, digest in delivery.sent.items() if served.get(name) != digest] for served in delivery.served
        ]
        engines = [engine for engine, names in enumerate(differing) if names]
        if engines:
            names = sorted({name for of_engine in differing for name in of_engine})
            yield Alarm(
                "weights_differ",
                f"engines {engines} serve other {delivery.role} tensors than were sent: {', '.join(names[:4])}"
                + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
                "an update was lost (sleep and wake, a reload from the first checkpoint), or another module's update "
                "overwrote tensors shared between target and drafter",
                "resume from the last checkpoint; if it comes back, take sleeping and reloading out of the engine",
                {"tensors": len(names), "engines": len(engines)},
                fatal=delivery.role == "policy",
            )
