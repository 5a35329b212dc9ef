"""The gate on simulated candidates, and the noise it reckons with."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cotrain.config.schema import DrafterConfig, GateConfig
from cotrain.publish.acceptance import expected_of
from cotrain.publish.decision import Outcome
from cotrain.publish.decision import judge as add_verdict
from cotrain.publish.evidence import Evidence, FreshScores, Publication
from cotrain.records import GainReport, RolloutBatch, Versions
from drafters.scores import RolloutAcceptance
from tests.cotrain.publish.simulated import sample_rollouts, score, true_length

SERVED = 1.0  # skill of the serving drafter: acceptance length 2.26


def judge(candidate, serving, prompts, gate=None, batch=None, lifetime_steps=1, swap_seconds=0.5, left=99) -> Outcome:
    """lifetime_steps: steps that the serving drafter has served. left: steps of the run."""
    scores = FreshScores(prompts, serving, candidate, updates=1, served_by=[])
    outcome = Outcome(Publication(0, swap_seconds=swap_seconds, served=lifetime_steps))
    config = DrafterConfig(model={"type": "eagle3"}, gate=gate or GateConfig())
    add_verdict(Evidence(1, batch or served(), Versions(0, 0), outcome.serving, scores), config, outcome, left)
    return outcome


def publishes(outcome: Outcome) -> bool:
    return kind(outcome) == "published"


def kind(outcome: Outcome) -> str | None:
    """None while the candidate waits."""
    return outcome.events[0].kind if outcome.events else None


def reason(outcome: Outcome) -> str:
    [event] = outcome.events
    return event.reason


def decisions(skill: float, count: int, seed: int, num_prompts=None, samples=None, own=0.2, grouped=True):
    """Verdicts on a candidate, each on its own rollouts."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rollouts = sample_rollouts(rng, num_prompts or int(rng.integers(6, 11)), samples or int(rng.integers(4, 7)))
        prompts = rollouts.names if grouped else [str(i) for i in range(len(rollouts.prompts))]
        found.append(judge(score(rollouts, skill, rng, own), score(rollouts, SERVED, rng, own), prompts))
    return found


def plain(accepted: list[float], steps: list[float]) -> list[RolloutAcceptance]:
    """One draft token."""
    known = np.array([0 if math.isnan(a) else 10 for a in accepted])
    of_steps, of_accepted = (np.array(values, np.float64) for values in (steps, accepted))
    return [RolloutAcceptance(of_steps, of_accepted[:, None], known)]


def changed(scored: list[RolloutAcceptance], **fields) -> list[RolloutAcceptance]:
    return [replace(scored[0], **fields)]


def pair(
    candidate: float, serving: float, count: int = 24
) -> tuple[list[RolloutAcceptance], list[RolloutAcceptance], list[str]]:
    """A gain that is nearly the same in every rollout; six prompts."""
    wiggle = [0.01 * (i % 5) for i in range(count)]
    ours, theirs = ([rate * 10 + w for w in wiggle] for rate in (candidate, serving))
    return plain(ours, [10.1] * count), plain(theirs, [10.1] * count), [str(i % 6) for i in range(count)]


def test_worse_candidates_stay_out_and_better_ones_get_in():
    """24 to 60 rollouts of 6 to 10 prompts; better: an acceptance length of 2.57 beside 2.26."""
    better = decisions(skill=1.6, count=20, seed=0)
    assert sum(publishes(d) for d in better) >= 18
    for skill in (-5.0, 0.85):  # corrupted: 1.02; stale: 2.18
        assert not any(publishes(d) for d in decisions(skill, count=20, seed=1))
    assert sum(publishes(d) for d in decisions(SERVED, count=20, seed=2)) <= 1


def test_lower_bound_is_wrong_as_often_as_it_says():
    truth = true_length(1.15) - true_length(SERVED)
    found = decisions(skill=1.15, count=250, seed=3, num_prompts=6, samples=4)
    assert sum(d.metrics["gate/lower_bound"] > truth for d in found) / 250 == pytest.approx(0.05, abs=0.035)
    assert np.mean([d.metrics["gate/gain"] for d in found]) == pytest.approx(truth, abs=0.015)


def test_noise_is_that_of_prompts_where_rollouts_of_a_prompt_resemble_each_other():
    """The same drafters on the same rollouts; taken as 24 of their own, they promise too much."""
    as_prompts, as_rollouts = (
        decisions(SERVED, count=100, seed=4, num_prompts=4, samples=6, own=0.6, grouped=grouped)
        for grouped in (True, False)
    )
    assert sum(d.metrics["gate/lower_bound"] > 0 for d in as_prompts) <= 10
    assert sum(d.metrics["gate/lower_bound"] > 0 for d in as_rollouts) >= 15


def test_jackknife_equals_leaving_out_each_prompt():
    rng = np.random.default_rng(5)
    rollouts = sample_rollouts(rng, 5, 3)
    scored = score(rollouts, SERVED, rng)
    without = []
    for prompt in range(5):
        rest = rollouts.prompts != prompt
        without.append(float(scored[-1].accepted[rest].sum() / scored[-1].steps[rest].sum()))
    promise = expected_of(scored, rollouts.names)
    assert promise is not None
    assert promise.error_at([0, 0, 1]) == pytest.approx(math.sqrt(4 * np.var(without)))
    assert promise.longest == pytest.approx(1 + float(scored[-1].accepted.sum() / scored[-1].steps.sum()))


def test_expectation_of_a_mixture_is_that_of_its_verification_steps():
    rng = np.random.default_rng(6)
    rollouts = sample_rollouts(rng, 5, 3)
    scored = score(rollouts, SERVED, rng)
    found = expected_of(scored, rollouts.names)
    assert found is not None
    lengths = [1 + float(of_length.accepted.sum() / of_length.steps.sum()) for of_length in scored]
    assert found.lengths == pytest.approx([1.0, *lengths])
    assert found.length_at((30, 0, 10)) == pytest.approx(0.75 * lengths[0] + 0.25 * lengths[2])
    assert sum(found.rates_at((30, 0, 10))) == pytest.approx(found.length_at((30, 0, 10)) - 1)
    assert found.error_at((1, 0, 0)) < found.error_at((0, 0, 1))
    assert [found.covers(steps) for steps in ((0, 0, 0), (1, 0, 0, 1), (1, 0, 0, 0))] == [False, False, True]


def served(seconds: float = 10.0, seconds_at: Sequence[Sequence[float]] = ()) -> RolloutBatch:
    """A step of generation; seconds_at: see GainReport, without any the draft length was fixed."""
    gain = GainReport(seconds_at=[list(row) for row in seconds_at]) if seconds_at else None
    return RolloutBatch([], [], seconds, 500, gain=gain)


def test_each_drafter_counts_at_the_draft_length_that_suits_it_best():
    """A weak drafter is served at one draft token, where the candidate would be served at three and save more."""
    rng = np.random.default_rng(7)
    rollouts = sample_rollouts(rng, 8, 4)
    drafters = [score(rollouts, skill, rng) for skill in (2.0, -1.0)]
    candidate, weak = (expected_of(drafter, rollouts.names) for drafter in drafters)
    alone = (4.0, 4.8, 5.4, 6.0)  # seconds of the step at draft lengths 0 to 3, were every draft token rejected
    fastest = [min(t / length for t, length in zip(alone, one.lengths, strict=True)) for one in (candidate, weak)]
    assert fastest[1] == pytest.approx(alone[1] / weak.lengths[1]) and fastest[0] < alone[1] / candidate.lengths[1]
    judgement = judge(*drafters, rollouts.names, batch=served(10.0, [alone]))
    assert judgement.metrics["gate/seconds_saved"] == pytest.approx(10.0 * (1 - fastest[0] / fastest[1]))
    at_the_served_length = 10.0 * (1 - weak.lengths[1] / candidate.lengths[1])
    assert judgement.metrics["gate/seconds_saved"] > 1.2 * at_the_served_length
    between = 1.1 * at_the_served_length
    assert publishes(judge(*drafters, rollouts.names, batch=served(10.0, [alone]), swap_seconds=between))


def test_batch_sizes_have_draft_lengths_of_their_own():
    """Where speculation is off with either drafter nothing is saved, and what it would switch on counts."""
    drafters = pair(1.0, 0.2)  # acceptance lengths 2.0 and 1.2 at one draft token
    small, large = (3.0, 3.6), (5.0, 15.0)
    for rows, saved in [([small], 1 - 1.8 / 3.0), ([large], 0.0), ([small, large], 1 - 6.8 / 8.0)]:
        judgement = judge(*drafters, batch=served(10.0, rows))
        assert judgement.metrics["gate/seconds_saved"] == pytest.approx(10.0 * saved, abs=0.05)
    assert "swap would cost more" in reason(judge(*drafters, batch=served(10.0, [large]), swap_seconds=0.0))


def test_at_a_fixed_draft_length_the_verification_steps_saved_count():
    decision = judge(*pair(1.0, 0.6), lifetime_steps=3)
    # Acceptance length 2.0 instead of 1.6, in three steps of 10 seconds.
    assert decision.metrics["gate/seconds_saved"] == pytest.approx(3 * 10 * (1 - 1.6 / 2.0), rel=0.01)
    assert publishes(decision)
    assert decision.metrics["gate/publish"] == 1.0
    assert decision.expected is not None
    assert decision.expected.rates[0] == pytest.approx((decision.metrics["gate/candidate_length"] - 1,))


def test_swap_that_costs_more_than_it_saves_is_not_made():
    decision = judge(*pair(1.0, 0.6), swap_seconds=100.0)
    assert not publishes(decision)
    assert "swap would cost more" in reason(decision)


def test_only_seconds_that_somebody_waits_for_count():
    """The learner waits for one of ten seconds of generation; the rest passes beside learning."""
    mostly_hidden = replace(served(), exposed=0.1)
    decision = judge(*pair(1.0, 0.6), batch=mostly_hidden, lifetime_steps=3, swap_seconds=1.0)
    assert decision.metrics["gate/seconds_saved"] == pytest.approx(0.1 * 3 * 10 * (1 - 1.6 / 2.0), rel=0.01)
    assert decision.metrics["gate/swap_seconds"] == pytest.approx(0.1)
    assert publishes(decision) and "10% of the generation time is waited for" in reason(decision)
    never_waits = replace(served(), exposed=0.0)
    assert not publishes(judge(*pair(1.0, 0.6), batch=never_waits, lifetime_steps=3, swap_seconds=1.0))


def test_certain_gain_within_the_margin_is_not_published():
    candidate, serving, prompts = pair(0.61, 0.60)
    assert not publishes(judge(candidate, serving, prompts, swap_seconds=0))
    candidate, serving, prompts = pair(0.63, 0.60)
    assert publishes(judge(candidate, serving, prompts, swap_seconds=0))


def test_always_publishes_what_has_finite_acceptances():
    always = GateConfig(publish_when="always")
    worse, serving, prompts = pair(0.2, 0.6)
    assert publishes(judge(worse, serving, prompts, always))
    unjudged = judge(worse, serving, ["a"] * 24, always)
    assert publishes(unjudged)
    assert unjudged.expected is None
    broken = changed(worse, steps=worse[0].steps * math.nan, known=worse[0].known * 0)
    assert not publishes(judge(broken, serving, prompts, always))


@pytest.mark.parametrize(("broken_one", "named"), [(0, "candidate"), (1, "serving drafter")])
def test_acceptances_that_are_not_finite_are_refused_even_in_one_rollout(broken_one, named):
    *drafters, prompts = pair(1.0, 0.5)
    steps, known = drafters[broken_one][0].steps.copy(), drafters[broken_one][0].known.copy()
    steps[3], known[3] = math.nan, 0
    drafters[broken_one] = changed(drafters[broken_one], steps=steps, known=known)
    decision = judge(*drafters, prompts)
    assert not publishes(decision)
    assert f"{named} are not finite on 1 of 24 rollouts" in reason(decision)
    assert decision.expected is None


def test_partly_unknown_acceptance_within_a_rollout_is_refused():
    candidate, serving, prompts = pair(1.0, 0.5)
    assert "not finite" in reason(judge(changed(candidate, known=candidate[0].known - 1), serving, prompts))


def test_rollouts_with_a_hole_are_left_out_for_both():
    candidate, serving, prompts = pair(1.0, 0.5)
    hole = np.arange(24) == 7
    drafters = [
        changed(d, steps=np.where(hole, math.nan, d[0].steps), known=d[0].known * ~hole) for d in (candidate, serving)
    ]
    decision = judge(*drafters, prompts)
    assert (publishes(decision), decision.metrics["gate/num_rollouts"]) == (True, 23)


@pytest.mark.parametrize(
    ("prompts", "found"), [([str(i % 6) for i in range(12)], "12 rollouts of 6"), (["a", "b"] * 12, "24 rollouts of 2")]
)
def test_a_candidate_waits_where_there_is_too_little_to_judge_by(prompts, found):
    candidate, serving, _ = pair(1.0, 0.5, count=len(prompts))
    judgement = judge(candidate, serving, prompts)
    assert kind(judgement) is None and judgement.serving.judged_update == 0
    assert [judgement.metrics[f"gate/num_{what}"] for what in ("rollouts", "prompts")] == [len(prompts), int(found[-1])]
    assert kind(judge(plain([], []), plain([], []), [])) is None
