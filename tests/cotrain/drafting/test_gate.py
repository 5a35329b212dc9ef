"""The gate on simulated candidates, and the noise it reckons with."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind_from_stats

from cotrain.drafting.gate import Estimate, Pace, decide, expected_of, noise_bound, pace_of, served_length
from cotrain.drafting.gate_config import GateConfig
from cotrain.records import Rollout, RolloutBatch, SpeculationCounts, Versions
from drafters.acceptance import RolloutAcceptance
from tests.cotrain.drafting.simulated import sample_rollouts, score, true_length

PACE = Pace(tokens_per_step=2000, seconds_per_verification=0.02)
SERVED = 1.0  # skill of the served drafter: acceptance length 2.26


def judge(candidate, serving, prompts, config=None, pace=PACE, lifetime_steps=1.0, swap_seconds=0.5):
    return decide(candidate, serving, prompts, pace, lifetime_steps, swap_seconds, config or GateConfig())


def decisions(skill: float, count: int, seed: int, num_prompts=None, samples=None, own=0.2, grouped=True):
    """Verdicts on a candidate, each on its own rollouts."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rollouts = sample_rollouts(rng, num_prompts or int(rng.integers(6, 11)), samples or int(rng.integers(4, 7)))
        prompts = rollouts.names if grouped else None
        found.append(judge(score(rollouts, skill, rng, own), score(rollouts, SERVED, rng, own), prompts))
    return found


def plain(accepted: list[float], steps: list[float]) -> RolloutAcceptance:
    """One draft token."""
    known = torch.tensor([0 if math.isnan(a) else 10 for a in accepted])
    return RolloutAcceptance(
        torch.tensor(steps, dtype=torch.float64), torch.tensor(accepted, dtype=torch.float64)[:, None], known
    )


def pair(candidate: float, serving: float, count: int = 24) -> tuple[RolloutAcceptance, RolloutAcceptance, list[str]]:
    """A gain that is nearly the same in every rollout; six prompts."""
    wiggle = [0.01 * (i % 5) for i in range(count)]
    ours, theirs = ([rate * 10 + w for w in wiggle] for rate in (candidate, serving))
    return plain(ours, [10.0] * count), plain(theirs, [10.0] * count), [str(i % 6) for i in range(count)]


def test_worse_candidates_stay_out_and_better_ones_get_in():
    """24 to 60 rollouts of 6 to 10 prompts; better: an acceptance length of 2.57 beside 2.26."""
    better = decisions(skill=1.6, count=20, seed=0)
    assert sum(d.publish for d in better) >= 18
    for skill in (-5.0, 0.85):  # corrupted: 1.02; stale: 2.18
        assert not any(d.publish for d in decisions(skill, count=20, seed=1))
    assert sum(d.publish for d in decisions(SERVED, count=20, seed=2)) <= 1


def test_lower_bound_is_wrong_as_often_as_it_says():
    truth = true_length(1.15) - true_length(SERVED)
    found = decisions(skill=1.15, count=250, seed=3, num_prompts=6, samples=4)
    assert sum(d.lower_bound > truth for d in found) / 250 == pytest.approx(0.05, abs=0.035)
    assert np.mean([d.gain for d in found]) == pytest.approx(truth, abs=0.015)


def test_noise_is_that_of_prompts_where_rollouts_of_a_prompt_resemble_each_other():
    """The same drafters on the same rollouts; taken as 24 of their own, they promise too much."""
    as_prompts, as_rollouts = (
        decisions(SERVED, count=100, seed=4, num_prompts=4, samples=6, own=0.6, grouped=grouped)
        for grouped in (True, False)
    )
    assert sum(d.lower_bound > 0 for d in as_prompts) <= 10
    assert sum(d.lower_bound > 0 for d in as_rollouts) >= 15


def test_jackknife_equals_leaving_out_each_prompt():
    rng = np.random.default_rng(5)
    rollouts = sample_rollouts(rng, 5, 3)
    scored = score(rollouts, SERVED, rng)
    without = []
    for prompt in range(5):
        rest = torch.from_numpy(rollouts.prompts != prompt)
        without.append(float(scored.accepted[rest].sum() / scored.steps[rest].sum()))
    promise = expected_of(scored, rollouts.names)
    assert promise is not None
    found = promise.length
    assert found.standard_error == pytest.approx(math.sqrt(4 * np.var(without)))
    assert found.value == pytest.approx(1 + float(scored.accepted.sum() / scored.steps.sum()))


def test_seconds_saved_are_those_of_the_verification_steps_saved():
    decision = judge(*pair(1.0, 0.6), lifetime_steps=3)
    # 2000 tokens in 1000 instead of 1250 verification steps of 0.02 s, in three steps.
    assert decision.seconds_saved == pytest.approx(3 * 250 * 0.02, rel=0.01)
    assert decision.publish
    assert decision.metrics()["gate/publish"] == 1.0
    assert decision.promise is not None
    assert decision.promise.rates == pytest.approx((decision.candidate_length - 1,))


def test_swap_that_costs_more_than_it_saves_is_not_made():
    decision = judge(*pair(1.0, 0.6), swap_seconds=100.0)
    assert not decision.publish
    assert "swap would cost more" in decision.reason
    assert not judge(*pair(1.0, 0.6), lifetime_steps=0).publish


def test_certain_gain_within_the_margin_is_not_published():
    candidate, serving, prompts = pair(0.61, 0.60)
    assert not judge(candidate, serving, prompts, swap_seconds=0).publish
    assert judge(candidate, serving, prompts, GateConfig(margin=0.005), swap_seconds=0).publish


def test_the_same_drafter_is_no_gain_even_without_a_margin():
    serving, _, prompts = pair(0.6, 0.6)
    assert not judge(serving, serving, prompts, GateConfig(margin=0), swap_seconds=0).publish


def test_over_random_weights_a_candidate_must_beat_no_draft_at_all():
    candidate, nothing, prompts = pair(0.5, 0.0)
    decision = judge(candidate, None, prompts)
    assert (decision.publish, decision.serving_length) == (True, 1.0)
    assert not judge(nothing, None, prompts, GateConfig(margin=0.05)).publish


def test_always_publishes_what_has_finite_acceptances():
    always = GateConfig(publish_when="always")
    worse, serving, prompts = pair(0.2, 0.6)
    assert judge(worse, serving, prompts, always).publish
    unjudged = judge(worse, serving, ["a"] * 24, always)
    assert unjudged.publish
    assert unjudged.promise is None
    broken = replace(worse, steps=worse.steps * math.nan, known=worse.known * 0)
    assert not judge(broken, serving, prompts, always).publish


@pytest.mark.parametrize(("broken_one", "named"), [(0, "candidate"), (1, "served drafter")])
def test_acceptances_that_are_not_finite_are_refused_even_in_one_rollout(broken_one, named):
    *drafters, prompts = pair(1.0, 0.5)
    steps, known = drafters[broken_one].steps.clone(), drafters[broken_one].known.clone()
    steps[3], known[3] = math.nan, 0
    drafters[broken_one] = replace(drafters[broken_one], steps=steps, known=known)
    decision = judge(*drafters, prompts)
    assert not decision.publish
    assert f"{named} are not finite on 1 of 24 rollouts" in decision.reason
    assert decision.promise is None


def test_partly_unknown_acceptance_within_a_rollout_is_refused():
    candidate, serving, prompts = pair(1.0, 0.5)
    assert "not finite" in judge(replace(candidate, known=candidate.known - 1), serving, prompts).reason


def test_candidate_without_finite_acceptances_over_random_weights_is_refused():
    candidate, _, prompts = pair(1.0, 0.5)
    broken = replace(candidate, steps=candidate.steps * math.nan, known=candidate.known * 0)
    assert "finite acceptances on none of 24 held-out rollouts" in judge(broken, None, prompts).reason


def test_rollouts_with_a_hole_are_left_out_for_both():
    candidate, serving, prompts = pair(1.0, 0.5)
    hole = torch.arange(24) == 7
    drafters = [
        replace(d, steps=d.steps.masked_fill(hole, math.nan), known=d.known * ~hole) for d in (candidate, serving)
    ]
    decision = judge(*drafters, prompts)
    assert (decision.publish, decision.num_rollouts) == (True, 23)


def test_too_little_to_judge_on_is_refused():
    candidate, serving, prompts = pair(1.0, 0.5, count=12)
    assert "12 held-out rollouts, min_rollouts is 16" in judge(candidate, serving, prompts).reason
    candidate, serving, _ = pair(1.0, 0.5)
    assert "are of 2 prompts, min_prompts is 4" in judge(candidate, serving, ["a", "b"] * 12).reason
    empty = plain([], [])
    assert "0 held-out rollouts" in judge(empty, empty, []).reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lifetime_steps": math.nan}, "lifetime_steps is nan"),
        ({"swap_seconds": -1.0}, "swap_seconds is -1.0"),
        ({"swap_seconds": math.inf}, "swap_seconds is inf"),
        ({"prompts": ["a"]}, "prompts names 1 rollouts, candidate has 24"),
        ({"serving": plain([1.0], [2.0])}, "score both on the same rollouts"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    candidate, serving, prompts = pair(1.0, 0.5)
    with pytest.raises(ValueError, match=message):
        judge(**({"candidate": candidate, "serving": serving, "prompts": prompts} | change))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_pace_must_be_measured(value):
    with pytest.raises(ValueError, match="tokens_per_step"):
        Pace(value, 0.1)
    with pytest.raises(ValueError, match="seconds_per_verification"):
        Pace(100, value)


def test_estimate_needs_two_groups_and_finite_numbers():
    with pytest.raises(ValueError, match="value is nan"):
        Estimate(math.nan, 0.1, 4)
    with pytest.raises(ValueError, match="score more prompts"):
        Estimate(2.0, 0.1, 1)
    assert expected_of(pair(1.0, 0.5)[0], ["a"] * 24) is None


def test_noise_bound_is_welchs():
    first, second = Estimate(2.5, 0.1, 6), Estimate(2.2, 0.05, 20)
    bound = noise_bound(first, second, 0.03)
    spread = [e.standard_error * math.sqrt(e.num_groups) for e in (first, second)]
    test = ttest_ind_from_stats(bound, spread[0], 6, 0.0, spread[1], 20, equal_var=False, alternative="greater")
    assert test.pvalue == pytest.approx(0.03)


def test_served_length_is_that_of_the_counters():
    def rollout(prompt, num_drafts, accepted):
        counts = SpeculationCounts(num_drafts, num_drafts * 2, accepted) if num_drafts else None
        return Rollout(prompt, 0, [1], [2], [0.0], "", "stop", Versions(0, 0), counts)

    rollouts = [rollout("a", 10, (5, 1)), rollout("a", 5, (4, 4)), rollout("b", 10, (6, 4)), rollout("c", 0, ())]
    found = served_length(rollouts)
    assert found is not None
    assert (found.value, found.num_groups) == (1 + 24 / 25, 2)
    assert served_length(rollouts[:2]) is None
    assert served_length(rollouts[3:]) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_rollouts": 4, "min_prompts": 8}, "min_prompts: 8 prompts are at least as many rollouts"),
        ({"max_rollouts": 12}, "max_rollouts: at most 12 rollouts are scored, but min_rollouts is 16"),
        ({"train_when": "drift", "explore_every": 1}, "explore_every: is 1, which trains in every step"),
        ({"min_prompts": 1}, "min_prompts"),
        ({"confidence": 0.5}, "confidence"),
        ({"confidence": 1.0}, "confidence"),
        ({"margin": -0.1}, "margin"),
        ({"margin": math.nan}, "margin"),
        ({"canary_alpha": 0.0}, "canary_alpha"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GateConfig(**fields)


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [
        (SpeculationCounts(60, 180, (30, 10, 0)), 8 / 60),  # 60 + 40 tokens, all drafted for
        (SpeculationCounts(30, 90, (30, 10, 0)), 8 / 60),  # 30 steps drafted, 30 did not
        (None, 8 / 100),  # a token is a step
    ],
)
def test_pace_counts_steps_with_and_without_draft_tokens(counts, seconds):
    assert pace_of(RolloutBatch([], [], counts, 8.0, 100)) == Pace(100.0, seconds)
    assert pace_of(RolloutBatch([], [], None, 8.0, 0)) is None
