"""The gate on simulated candidates, and the noise it reckons with."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind_from_stats

from cotrain.config.gate import GateConfig
from cotrain.publish.expected import Estimate, expected_of, noise_bound, served_length
from cotrain.publish.gate import Pace, decide, pace_of
from cotrain.records import Rollout, RolloutBatch, Versions
from drafters.acceptance import RolloutAcceptance
from tests.cotrain.publish.simulated import sample_rollouts, score, true_length
from tests.speculation_counts import counts

PACE = Pace(tokens_per_step=2000, seconds_per_verification=0.02, steps=(0, 0, 0, 900))
SERVED = 1.0  # skill of the served drafter: acceptance length 2.26


ONE_DRAFT_TOKEN = Pace(tokens_per_step=2000, seconds_per_verification=0.02, steps=(0, 900))


def judge(candidate, serving, prompts, config=None, pace=None, lifetime_steps=1.0, swap_seconds=0.5):
    pace = pace or (PACE if len(candidate) > 1 else ONE_DRAFT_TOKEN)
    return decide(candidate, serving, prompts, pace, lifetime_steps, swap_seconds, config or GateConfig())


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
    known = torch.tensor([0 if math.isnan(a) else 10 for a in accepted])
    of_steps, of_accepted = (torch.tensor(values, dtype=torch.float64) for values in (steps, accepted))
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
        without.append(float(scored[-1].accepted[rest].sum() / scored[-1].steps[rest].sum()))
    promise = expected_of(scored, rollouts.names)
    assert promise is not None
    found = promise.longest
    assert found.standard_error == pytest.approx(math.sqrt(4 * np.var(without)))
    assert found.value == pytest.approx(1 + float(scored[-1].accepted.sum() / scored[-1].steps.sum()))


def test_expectation_of_a_mixture_is_that_of_its_verification_steps():
    rng = np.random.default_rng(6)
    rollouts = sample_rollouts(rng, 5, 3)
    scored = score(rollouts, SERVED, rng)
    found = expected_of(scored, rollouts.names)
    assert found is not None
    alone = [found.at([int(k == j) for j in range(3)]) for k in range(3)]
    for one, of_length in zip(alone, scored, strict=True):
        assert one.value == pytest.approx(1 + float(of_length.accepted.sum() / of_length.steps.sum()))
    assert found.at((30, 0, 10)).value == pytest.approx(0.75 * alone[0].value + 0.25 * alone[2].value)
    assert sum(found.rates_at((30, 0, 10))) == pytest.approx(found.at((30, 0, 10)).value - 1)
    assert alone[0].standard_error < alone[2].standard_error
    for steps in ((0, 0, 0), (1, 0, 0, 1)):
        with pytest.raises(ValueError, match="score drafters at the longest draft length served"):
            found.at(steps)


def test_seconds_saved_are_those_of_the_draft_lengths_served():
    """On text where the longest draft gains much, a step that drafts one token a time gains little."""
    rng = np.random.default_rng(7)
    rollouts = sample_rollouts(rng, 8, 4)
    drafters = [score(rollouts, skill, rng) for skill in (1.6, SERVED)]
    saved = [
        judge(*drafters, rollouts.names, pace=replace(PACE, steps=steps)).seconds_saved
        for steps in ((0, 0, 0, 900), (0, 900, 0, 0), (800, 900, 0, 0), (0, 0, 0, 0), (900, 10, 10, 10))
    ]
    assert saved[0] > saved[1] > saved[2] > 0
    assert all(math.isnan(seconds) for seconds in saved[3:]), "in a step that drafted next to nothing nobody knows"


def test_a_good_candidate_is_published_while_nothing_is_drafted():
    """Otherwise speculation that is off would keep the drafter out that could switch it on."""
    decision = judge(*pair(1.0, 0.0), pace=Pace(2000, 0.02, (2000, 0)), swap_seconds=100.0)
    assert decision.publish and "next to nothing was drafted" in decision.reason
    assert "gate/seconds_saved" not in decision.metrics()


def test_seconds_saved_are_those_of_the_verification_steps_saved():
    decision = judge(*pair(1.0, 0.6), lifetime_steps=3)
    # 2000 tokens in 1000 instead of 1250 verification steps of 0.02 s, in three steps.
    assert decision.seconds_saved == pytest.approx(3 * 250 * 0.02, rel=0.01)
    assert decision.publish
    assert decision.metrics()["gate/publish"] == 1.0
    assert decision.expected is not None
    assert decision.expected.rates[0] == pytest.approx((decision.candidate_length - 1,))


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


def test_always_publishes_what_has_finite_acceptances():
    always = GateConfig(publish_when="always")
    worse, serving, prompts = pair(0.2, 0.6)
    assert judge(worse, serving, prompts, always).publish
    unjudged = judge(worse, serving, ["a"] * 24, always)
    assert unjudged.publish
    assert unjudged.expected is None
    broken = changed(worse, steps=worse[0].steps * math.nan, known=worse[0].known * 0)
    assert not judge(broken, serving, prompts, always).publish


@pytest.mark.parametrize(("broken_one", "named"), [(0, "candidate"), (1, "served drafter")])
def test_acceptances_that_are_not_finite_are_refused_even_in_one_rollout(broken_one, named):
    *drafters, prompts = pair(1.0, 0.5)
    steps, known = drafters[broken_one][0].steps.clone(), drafters[broken_one][0].known.clone()
    steps[3], known[3] = math.nan, 0
    drafters[broken_one] = changed(drafters[broken_one], steps=steps, known=known)
    decision = judge(*drafters, prompts)
    assert not decision.publish
    assert f"{named} are not finite on 1 of 24 rollouts" in decision.reason
    assert decision.expected is None


def test_partly_unknown_acceptance_within_a_rollout_is_refused():
    candidate, serving, prompts = pair(1.0, 0.5)
    assert "not finite" in judge(changed(candidate, known=candidate[0].known - 1), serving, prompts).reason


def test_rollouts_with_a_hole_are_left_out_for_both():
    candidate, serving, prompts = pair(1.0, 0.5)
    hole = torch.arange(24) == 7
    drafters = [
        changed(d, steps=d[0].steps.masked_fill(hole, math.nan), known=d[0].known * ~hole) for d in (candidate, serving)
    ]
    decision = judge(*drafters, prompts)
    assert (decision.publish, decision.num_rollouts) == (True, 23)


def test_too_little_to_judge_on_is_refused():
    candidate, serving, prompts = pair(1.0, 0.5, count=12)
    assert "12 rollouts were scored, drafter.gate.min_rollouts is 16" in judge(candidate, serving, prompts).reason
    candidate, serving, _ = pair(1.0, 0.5)
    assert "are of 2 prompts, drafter.gate.min_prompts is 4" in judge(candidate, serving, ["a", "b"] * 12).reason
    empty = plain([], [])
    assert "0 rollouts were scored" in judge(empty, empty, []).reason


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
        Pace(value, 0.1, (0, 1))
    with pytest.raises(ValueError, match="seconds_per_verification"):
        Pace(100, value, (0, 1))


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
        found = counts(num_drafts, 2, accepted) if num_drafts else None
        return Rollout(prompt, 0, [1], [2], [0.0], "", "stop", Versions(0, 0), found)

    rollouts = [rollout("a", 10, (5, 1)), rollout("a", 5, (4, 4)), rollout("b", 10, (6, 4)), rollout("c", 0, ())]
    found = served_length(rollouts)
    assert found is not None
    assert (found.value, found.num_groups) == (1 + 24 / 25, 2)
    assert served_length(rollouts[:2]) is None
    assert served_length(rollouts[3:]) is None


@pytest.mark.parametrize(
    ("found", "seconds", "steps"),
    [
        (counts(60, 3, (30, 10, 0)), 8 / 60, (0, 0, 0, 60)),  # 60 + 40 tokens, all drafted for
        (counts(30, 3, (30, 10, 0)), 8 / 60, (30, 0, 0, 30)),  # 30 steps drafted, 30 did not
        (None, 8 / 100, (100,)),  # a token is a step
    ],
)
def test_pace_counts_steps_with_and_without_draft_tokens(found, seconds, steps):
    pace = pace_of(RolloutBatch([], [], found, 8.0, 100))
    assert pace == Pace(100.0, seconds, steps)
    assert pace.drafts == (found is not None and steps[0] == 0)
    assert pace_of(RolloutBatch([], [], None, 8.0, 0)) is None
