"""The canary on simulated publications: kept promises, planted bad drafters, and its bookkeeping."""

import json

import numpy as np
import pytest
import torch

from cotrain.config.gate import GateConfig
from cotrain.publish.canary import Canary
from cotrain.publish.expected import expected_of
from cotrain.records import SpeculationCounts
from cotrain.rollout.acceptance_stats import counts_of_steps
from drafters.acceptance import StartAcceptance, rollout_acceptances
from tests.cotrain.publish.simulated import sample_rollouts, score, serve
from tests.speculation_counts import counts, expected

PROMISE = expected((0.6, 0.4, 0.2))
KEPT = counts(100, 3, (60, 40, 20))
BROKEN = counts(100, 3, (2, 0, 0))
SKILL, COLLAPSED = 1.3, -5.0  # acceptance lengths 2.41 and 1.02


def first_alarms(config: GateConfig, served_skill: float, count: int, prompts: int, samples: int = 2) -> list[int]:
    """Step of each roll-back, 0 for none. 24 held-out rollouts, those of `prompts` served in a step."""
    rng = np.random.default_rng(0)
    alarms = []
    for _ in range(count):
        held_out = sample_rollouts(rng, 24 // samples, samples)
        promise = expected_of(score(held_out, SKILL, rng), held_out.names)
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
    decision = canary.observe(counts(300, 3, (150, 90, 60)), 8)
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


@pytest.mark.parametrize("nothing", [None, counts(0, 3, (0, 0, 0))])
def test_a_step_without_drafts_proves_nothing(nothing):
    canary = Canary(GateConfig(canary_steps=1), version=0)
    canary.published(1, PROMISE)
    assert canary.observe(nothing, 8).verdict == "no look"
    assert canary.watching
    canary.published(2, PROMISE)
    assert canary.last_good == 0


def test_shorter_drafts_are_held_against_what_they_can_accept():
    mixed = SpeculationCounts((500, 0, 500), ((300, 0, 0), (0, 0, 0), (300, 200, 100)))
    for served in (counts(1000, 1, (600,), 3), mixed):
        canary = Canary(GateConfig(), version=0)
        canary.published(1, PROMISE)
        decision = canary.observe(served, 8)
        assert decision.verdict == "watching"
        assert decision.promised_length == pytest.approx(decision.served_length)
    assert canary.observe(counts(1000, 2, (100, 0), 3), 8).verdict == "roll back"


def periodic(rollouts: int, easy: float = 0.96) -> list[StartAcceptance]:
    """Texts of two easy tokens and one that no draft gets right, over and over, 60 tokens each."""
    tokens = np.arange(60 + 3)
    easy_at = np.where(tokens % 3 == 2, 0.0, easy)
    table = np.stack([easy_at[k : k + 60] for k in range(3)])
    rows = np.repeat(np.arange(rollouts), 60)
    chances = torch.from_numpy(np.tile(table, rollouts))
    return [StartAcceptance(chances, chances, torch.from_numpy(rows), torch.arange(60).repeat(rollouts))]


@pytest.mark.parametrize("draft_tokens", [1, 2, 3])
def test_a_healthy_drafter_is_kept_on_text_whose_hard_tokens_come_in_a_rhythm(draft_tokens):
    """The first draft token is accepted in 0.92 of the steps at k = 3, and in 0.50 at k = 1: fewer, not as many."""
    promise = expected_of(rollout_acceptances(periodic(24), 3), [str(i % 8) for i in range(24)])
    assert promise is not None
    rng, steps = np.random.default_rng(0), []
    for _ in range(32):
        start = 0
        while start < 60:
            taken = 0
            while taken < draft_tokens and rng.random() < (0.0 if (start + taken) % 3 == 2 else 0.96):
                taken += 1
            steps.append((draft_tokens, taken))
            start += 1 + taken
    served = counts_of_steps(steps, 3)
    canary = Canary(GateConfig(canary_tolerance=0), version=0)
    canary.published(1, promise)
    decision = canary.observe(served, 8)
    assert decision.verdict == "watching", decision.reason
    assert decision.promised_length == pytest.approx(served.acceptance_length, rel=0.03)
    assert promise.rates[0][0] < 0.6 < 0.9 < promise.rates[2][0]


def test_little_evidence_is_no_proof_of_a_broken_promise():
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    assert canary.observe(counts(3, 3, (0, 0, 0)), 8).verdict == "watching"


def test_a_promise_less_certain_or_fewer_prompts_lower_the_bound():
    bounds = []
    for error, num_prompts in [(0.01, 8), (0.1, 8), (0.1, 2)]:
        canary = Canary(GateConfig(), version=0)
        canary.published(1, expected((0.6, 0.4, 0.2), error))
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


@pytest.mark.parametrize("rates", [(), (1.2,), (float("nan"),), (-0.1,)])
def test_an_expectation_nobody_could_have_is_refused(rates):
    with pytest.raises(ValueError, match="they must be shares"):
        expected(rates)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (counts(10, 4, (5, 4, 3, 2)), "score candidates at the longest draft length served"),
        (SpeculationCounts((10, 0, 0), ((5, 4, 0), (0, 0, 0), (0, 0, 0))), "verification steps of 1 draft tokens"),
        (counts(10, 3, (5, 6, 3)), "accepted is"),
        (counts(10, 3, (11, 6, 3)), "accepted is"),
        (counts(10, 3, (5, 4, -1)), "accepted is"),
    ],
)
def test_counts_no_engine_can_have_are_refused(found, message):
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    with pytest.raises(ValueError, match=message):
        canary.observe(found, 8)
    assert canary.observe(KEPT, 8).look == 1  # nothing of them was counted


def test_number_of_prompts_is_needed():
    canary = Canary(GateConfig(), version=0)
    canary.published(1, PROMISE)
    with pytest.raises(ValueError, match="num_prompts is 0"):
        canary.observe(KEPT, 0)
