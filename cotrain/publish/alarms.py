"""Alarms of one step: what has failed in the drafter or its delivery to the engines, the probable cause, and the remedy.

Two of them are statistical tests of the served acceptance against what the trainer expects of the serving drafter on
the same rollouts. A drafter without an expected gain, such as a random one, raises neither.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cotrain.acceptance_stats import total_counts
from cotrain.config.schema import MIN_PROMPTS, DrafterConfig
from cotrain.process.failures import RunFailure
from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.publish.evidence import CANARY_STEPS, Evidence
from cotrain.records import SpeculationCounts

FALSE_ALARM_RATE, NUM_TESTS = 0.01, 2
"""Probability that the statistical alarms of a whole run fire although the drafter is healthy. A false alarm ends the run, so it
may happen in one of a hundred at most. The probability is split evenly over NUM_TESTS and the steps of the run."""

CANARY_ALPHA = 0.02
"""Probability that a publication which serves as expected is rolled back, split over its CANARY_STEPS. That costs two swaps and
the gain of one candidate, so it may happen far more often than a false alarm, which ends the run."""

ROLLOUT_CORRELATION = 0.2
"""Intraclass correlation of acceptance within a rollout, as assumed by the test for zero acceptance: drafts of one rollout tend
to succeed or fail together. 0 would count every draft as an independent trial."""

LOWER_BOUND_ERRORS = 3.0  # number of standard errors that the test for zero acceptance subtracts from the expected gain

LAG_ROUNDS = 4  # training rounds that may pass without a comparison, while steps have enough rollouts for one


ADVICE = tomllib.loads(Path(__file__).with_name("alarms.toml").read_text(encoding="utf-8"))
"""Probable cause and remedy of each alarm, by its name."""


@dataclass(frozen=True)
class Alarm:
    """One alarm: text and numbers."""

    name: str  # one of ADVICE
    what: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    fatal: bool = False
    """Whether the rollouts themselves cannot be trusted, so that continuing without speculation would not help."""

    def __str__(self) -> str:
        advice = ADVICE[self.name]
        return f"{self.name}: {self.what}. Probable cause: {advice['cause']}. Remedy: {advice['remedy']}."


class DrafterAlarm(RunFailure):
    """Alarms that stop a run."""

    def __init__(self, step: int, alarms: Sequence[Alarm]) -> None:
        self.names, self.fatal = ", ".join(alarm.name for alarm in alarms), any(alarm.fatal for alarm in alarms)
        way_on = 'To continue without speculation after such an alarm, set drafter.on_drafter_failure = "continue".'
        lines = [f"step {step} raised {self.names}", *map(str, alarms), *([] if self.fatal else [way_on])]
        super().__init__("\n  ".join(lines))


def check_step(evidence: Evidence, config: DrafterConfig, total_steps: int) -> list[Alarm]:
    """Return all alarms of one step of a run of `total_steps` steps.

    While the canary watches the serving drafter, low acceptance is left to the canary.
    """
    low = None if evidence.serving.watched else check_acceptance(evidence, config, total_steps)[1]
    return [*_failures(evidence, config), *([] if low is None else [low])]


def collapse_probability(expected: ExpectedAcceptance, counts: SpeculationCounts, num_rollouts: int) -> float:
    """Return the probability that a drafter as good as expected gets no draft token accepted in these verification steps.

    The first draft token of each step is a trial. The design effect of ROLLOUT_CORRELATION (Kish, Survey Sampling, 5.4) gives the
    number of independent trials. Their success rate is the lower bound of the expected one; the result is 1.0 if that is 0.
    """
    gain = expected.length_at(counts.steps) - 1
    lower = 1 - LOWER_BOUND_ERRORS * expected.error_at(counts.steps) / gain if gain else 0.0
    trials = counts.num_drafts / (1 + (counts.num_drafts / num_rollouts - 1) * ROLLOUT_CORRELATION)
    return float((1 - expected.rates_at(counts.steps)[0] * max(0.0, lower)) ** max(trials, 1.0))


def check_acceptance(
    evidence: Evidence, config: DrafterConfig, total_steps: int
) -> tuple[dict[str, float], Alarm | None]:
    """Compare served with expected acceptance on the same rollouts; alarm if the difference is beyond noise and tolerance.

    The numbers are empty if the step has no evidence on the drafter.
    """
    # After a pause in drafting, the expected acceptance of a rollout is unknown.
    serving = evidence.versions.drafter
    rollouts = [r for r in evidence.batch.rollouts if r.drafted_throughout and r.versions.drafter == serving]
    counts, expected = total_counts(r.speculation for r in rollouts), evidence.expected
    if counts is None or expected is None or not expected.covers(counts.steps):
        return {}, None
    canary = evidence.serving.watched > 0
    significance = CANARY_ALPHA / CANARY_STEPS if canary else FALSE_ALARM_RATE / (total_steps * NUM_TESTS)
    served, length, num_drafts = counts.acceptance_length, expected.length_at(counts.steps), counts.num_drafts
    num_prompts = len({rollout.prompt_id for rollout in rollouts})
    tolerance = config.alarms.tolerance * (length - 1.0)
    bound = expected.lowest_served(counts.steps, num_prompts, tolerance, significance)
    numbers = {"served_length": served, "expected_length": length, "num_drafts": float(num_drafts), "bound": bound}
    if served == 1.0 and (chance := collapse_probability(expected, counts, len(rollouts))) < significance:
        what = f"no draft token was accepted in {num_drafts} verification steps, where an acceptance length of "
        what += f"{length:.2f} is expected (chance {chance:.1g})"
        return numbers, Alarm("acceptance_collapsed", what, numbers | {"chance": chance})
    if 1.0 < served < bound and expected.num_prompts >= MIN_PROMPTS:
        what = f"served acceptance length {served:.3f} is below {bound:.3f}, where {length:.3f} is expected"
        return numbers, Alarm("acceptance_below_expected", what, numbers)
    return numbers, None


def _failures(evidence: Evidence, config: DrafterConfig) -> Iterator[Alarm]:
    """Yield alarms for other versions than those sent, a lack of draft tokens, and candidates that never come."""
    batch, believed = evidence.batch, evidence.versions
    if others := {rollout.versions for rollout in batch.rollouts} - {believed, *evidence.known}:
        seen, fatal = ", ".join(sorted(map(str, others))), any(version.policy != believed.policy for version in others)
        what = f"rollouts were generated by {seen}, but the engines should serve {believed}"
        yield Alarm("wrong_version", what, fatal=fatal)
    asked = batch.gain is None or batch.gain.longest_draft > 0  # where a later step could verify them
    drafted = batch.speculation is not None and batch.speculation.num_drafts > 0
    if asked and not drafted and any(len(rollout.token_ids) > 1 for rollout in batch.rollouts):
        what = f"{batch.num_generated_tokens} tokens were generated with speculation on and not one was drafted"
        yield Alarm("no_draft_tokens", what)
    lag, limit = evidence.serving.unjudged, LAG_ROUNDS * config.train_every
    if config.train and lag > limit:
        what = f"no candidate was compared with the serving drafter in {lag} steps with enough rollouts (limit {limit})"
        yield Alarm("drafter_lags", what)
