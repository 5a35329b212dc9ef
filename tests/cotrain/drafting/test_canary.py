"""The canary on simulated publications: kept promises, planted bad drafters, and its bookkeeping."""

import json

import numpy as np
import pytest

from cotrain.drafting.canary import Canary
from cotrain.drafting.gate import Estimate, Pace, Promise, decide
from cotrain.drafting.gate_config import GateConfig
from cotrain.records import SpeculationCounts
from tests.cotrain.drafting.simulated import sample_rollouts, score, serve

PROMISE = Promise(Estimate(2.2, 0.05, 10), (0.6, 0.4, 0.2))
KEPT = SpeculationCounts(100, 300, (60, 40, 20))
BROKEN = SpeculationCounts(100, 300, (2, 0, 0))
SKILL, COLLAPSED = 1.3, -5.0  # acceptance lengths 2.41 and 1.02


def first_alarms(config: GateConfig, served_skill: float, count: int, prompts: int, samples: int = 2) -> list[int]:
    """Step of each roll-back, 0 for none. 24 held-out rollouts, those of `prompts` served in a step."""
    rng, pace = np.random.default_rng(0), Pace(2000, 0.02)
    alarms = []
    for _ in range(count):
        held_out = sample_rollouts(rng, 24 // samples, samples)
        promise = decide(score(held_out, SKILL, rng), None, held_out.names, pace, 1, 0.0, config).promise
        assert promise is not None
        canary = Canary(config, version=0)
        canary.published(1, promise)
        verdicts = []
        while canary.watching and "roll back" not in verdicts:
            rollouts = sample_rollouts(rng, prompts, samples)
            verdicts.append(canary.observe(serve(rollouts, served_skill, rng), prompts).verdict)
        alarms.append(len(verdicts) if verdicts[-1] == "roll back" else 0)
    return alarms


@pytest.mark.parametrize(("prompts", "samples"), [(1, 1), (2, 2), (3, 2)])  # 30, 120, 180 verification steps a step
def test_planted_bad_publication_is_rolled_back_within_two_steps(prompts, samples):
    alarms = first_alarms(GateConfig(), COLLAPSED, 60, prompts, samples)
    assert sum(alarm in (1, 2) for alarm in alarms) >= 59


@pytest.mark.parametrize("prompts", [2, 4])
def test_kept_promises_are_rolled_back_no_more_often_than_alpha(prompts):
    config = GateConfig(canary_alpha=0.1, canary_tolerance=0)
    assert sum(alarm > 0 for alarm in first_alarms(config, SKILL, 200, prompts)) / 200 <= 0.1


def test_a_broken_promise_goes_back_to_the_last_good_version():
    canary = Canary(GateConfig(), version=4)
    canary.published(5, PROMISE)
    decision = canary.observe(BROKEN, 8)
    assert (decision.verdict, decision.version, decision.roll_back_to) == ("roll back", 5, 4)
    assert "served at acceptance length 1.020, promised 2.200" in decision.reason
    assert decision.metrics()["canary/roll_back_to"] == 4.0
    canary.rolled_back(6)
    assert (canary.serving, canary.last_good, canary.watching) == (6, 6, False)
    assert canary.observe(KEPT, 8).verdict == "not watching"


def test_a_kept_promise_makes_the_version_good():
    canary = Canary(GateConfig(canary_steps=3), version=0)
    canary.published(1, PROMISE)
    assert [canary.observe(KEPT, 8).verdict for _ in range(4)] == ["watching", "watching", "kept", "not watching"]
    assert canary.last_good == 1


def test_counts_of_all_steps_since_the_publication_are_judged_together():
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    canary.observe(KEPT, 8)
    decision = canary.observe(SpeculationCounts(300, 900, (150, 90, 60)), 8)
    assert (decision.served_length, decision.num_drafts, decision.look) == (2.05, 400, 2)


@pytest.mark.parametrize(("looks", "last_good"), [(0, 0), (1, 1)])
def test_a_version_replaced_on_probation_is_good_if_it_was_served_well(looks, last_good):
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    for _ in range(looks):
        canary.observe(KEPT, 8)
    canary.published(2, PROMISE)
    assert canary.last_good == last_good
    assert canary.observe(BROKEN, 8).roll_back_to == last_good


def test_a_version_without_a_promise_is_not_watched():
    canary = Canary(GateConfig(), version=0)
    canary.published(1, None)
    assert (canary.serving, canary.last_good, canary.watching) == (1, 1, False)


@pytest.mark.parametrize("counts", [None, SpeculationCounts(0, 0, (0, 0, 0))])
def test_a_step_without_drafts_proves_nothing(counts):
    canary = Canary(GateConfig(canary_steps=1), version=0)
    canary.published(1, PROMISE)
    assert canary.observe(counts, 8).verdict == "no look"
    assert canary.watching
    canary.published(2, PROMISE)
    assert canary.last_good == 0


def test_shorter_drafts_are_held_against_what_they_can_accept():
    for counts in (SpeculationCounts(1000, 1000, (600,)), SpeculationCounts(1000, 2000, (600, 300))):
        canary = Canary(GateConfig(), version=0)
        canary.published(1, PROMISE)
        decision = canary.observe(counts, 8)
        assert decision.verdict == "watching"
        assert decision.promised_length == pytest.approx(decision.served_length)
    assert canary.observe(SpeculationCounts(1000, 2000, (100, 0, 0)), 8).verdict == "roll back"


def test_little_evidence_is_no_proof_of_a_broken_promise():
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    assert canary.observe(SpeculationCounts(3, 9, (0, 0, 0)), 8).verdict == "watching"


def test_a_promise_less_certain_or_fewer_prompts_lower_the_bound():
    bounds = []
    for error, num_prompts in [(0.01, 8), (0.1, 8), (0.1, 2)]:
        canary = Canary(GateConfig(), version=0)
        canary.published(1, Promise(Estimate(2.2, error, 10), PROMISE.rates))
        bounds.append(canary.observe(KEPT, num_prompts).bound)
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) == 3


def test_continues_exactly_on_probation():
    canary, loaded = Canary(GateConfig(), version=0), Canary(GateConfig(), version=9)
    canary.published(1, PROMISE)
    canary.observe(KEPT, 8)
    loaded.load_state(json.loads(json.dumps(canary.state())))
    assert loaded.observe(KEPT, 8) == canary.observe(KEPT, 8)
    assert loaded.state() == canary.state()


@pytest.mark.parametrize("method", ["published", "rolled_back"])
def test_versions_only_go_up(method):
    canary = Canary(GateConfig(), version=3)
    with pytest.raises(ValueError, match="version 3 was published after version 3"):
        getattr(canary, method)(3, *([PROMISE] if method == "published" else []))


@pytest.mark.parametrize(
    ("rates", "message"),
    [((), "rates of the promise are"), ((1.2,), "rates of the promise are"), ((0.5,), "its rates add up to 1.5"),
     ((float("nan"),), "rates of the promise are")],
)  # fmt: skip
def test_a_promise_nobody_could_keep_is_refused(rates, message):
    with pytest.raises(ValueError, match=message):
        Canary(GateConfig(), version=0).published(1, Promise(Estimate(2.2, 0.05, 10), rates))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (SpeculationCounts(10, 40, (5, 4, 3, 2)), "score candidates at the longest draft length served"),
        (SpeculationCounts(10, 5, (5, 4, 3)), "num_draft_tokens is 5 in 10 verification steps"),
        (SpeculationCounts(10, 30, (5, 6, 3)), "accepted_per_position is"),
        (SpeculationCounts(10, 30, (11, 6, 3)), "accepted_per_position is"),
        (SpeculationCounts(10, 30, (5, 4, -1)), "accepted_per_position is"),
    ],
)
def test_counts_no_engine_can_have_are_refused(counts, message):
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    with pytest.raises(ValueError, match=message):
        canary.observe(counts, 8)
    assert canary.observe(KEPT, 8).look == 1  # nothing of them was counted


def test_number_of_prompts_is_needed():
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    with pytest.raises(ValueError, match="num_prompts is 0"):
        canary.observe(KEPT, 0)
