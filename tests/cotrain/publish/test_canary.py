"""The canary on simulated publications: drafters that serve as expected, planted bad ones, and what is remembered."""

import numpy as np
import pytest
import torch

from cotrain.publish import decision
from cotrain.publish.acceptance import expected_of
from cotrain.publish.decision import Judgement, watch
from cotrain.publish.evidence import Probation, Publication
from cotrain.records import SpeculationCounts
from cotrain.rollout.acceptance_stats import counts_of_steps
from drafters.acceptance import StartAcceptance, rollout_acceptances
from tests.cotrain.publish.simulated import sample_rollouts, score, serve
from tests.speculation_counts import counts, expected

EXPECTED = expected((0.6, 0.4, 0.2))
AS_EXPECTED = counts(100, 3, (60, 40, 20))
BROKEN = counts(100, 3, (2, 0, 0))
SKILL, COLLAPSED = 1.3, -5.0  # acceptance lengths 2.41 and 1.02
FIRST = Publication(version=0, last_good=0, judged_on=0)


def watched(probation: Probation, *steps: SpeculationCounts, num_prompts: int = 8) -> Judgement:
    """What the canary says after the last of these steps."""
    for found in steps:
        probation = probation.after(found, num_prompts)
    return watch(probation, Publication(5, 4, 0, probation=probation))


def first_alarms(served_skill: float, count: int, prompts: int, samples: int = 2) -> list[int]:
    """Step of each roll-back, 0 for none. The expectation is of 24 rollouts, those of `prompts` are served in a step."""
    rng = np.random.default_rng(0)
    alarms = []
    for _ in range(count):
        scored = sample_rollouts(rng, 24 // samples, samples)
        promise = expected_of(score(scored, SKILL, rng), scored.names)
        assert promise is not None
        probation, kind = Probation(promise), None
        while kind is None:
            probation = probation.after(serve(sample_rollouts(rng, prompts, samples), served_skill, rng), prompts)
            kind = watch(probation, FIRST).kind
        alarms.append(probation.num_steps if kind == "rolled back" else 0)
    return alarms


@pytest.mark.parametrize(("prompts", "samples"), [(1, 1), (2, 2), (3, 2)])  # 30, 120, 180 verification steps a step
def test_planted_bad_publication_is_rolled_back_within_two_steps(prompts, samples):
    alarms = first_alarms(COLLAPSED, 60, prompts, samples)
    assert sum(alarm in (1, 2) for alarm in alarms) >= 59


@pytest.mark.parametrize("prompts", [2, 4])
def test_healthy_publications_are_rolled_back_no_more_often_than_alpha(prompts, monkeypatch):
    monkeypatch.setattr(decision, "CANARY_ALPHA", 0.1)
    monkeypatch.setattr(decision, "CANARY_TOLERANCE", 0.0)
    assert sum(alarm > 0 for alarm in first_alarms(SKILL, 200, prompts)) / 200 <= 0.1


def test_a_publication_that_serves_worse_goes_back_to_the_last_good_version():
    found = watched(Probation(EXPECTED), BROKEN)
    assert found.kind == "rolled back"
    assert "version 5 is served at acceptance length 1.020, expected 2.200" in found.reason
    assert found.numbers["canary/roll_back_to"] == 4.0


def test_a_publication_is_kept_after_its_last_watched_step():
    assert [watched(Probation(EXPECTED), *[AS_EXPECTED] * n).kind for n in (1, 2, 3, 4)] == [None, None, None, "kept"]


def test_counts_of_all_steps_since_the_publication_are_judged_together():
    found = watched(Probation(EXPECTED), AS_EXPECTED, counts(300, 3, (150, 90, 60))).numbers
    assert (found["canary/served_length"], found["canary/num_drafts"], found["canary/step"]) == (2.05, 400, 2)


@pytest.mark.parametrize(("steps", "last_good"), [(0, 0), (1, 1)])
def test_a_version_replaced_on_probation_is_good_if_it_was_served_well(steps, last_good):
    serving = FIRST.published(1, 3, EXPECTED, 0.1)
    for _ in range(steps):
        assert serving.probation is not None
        serving = Publication(1, 0, 3, probation=serving.probation.after(AS_EXPECTED, 8))
    assert serving.published(2, 4, EXPECTED, 0.1).last_good == last_good


def test_a_version_without_an_expectation_or_rolled_back_is_not_watched():
    for serving in (FIRST.published(1, 3, None, 0.1), FIRST.published(1, 3, EXPECTED, 0.1).rolled_back(2, 0.1)):
        assert serving.probation is None and serving.last_good == serving.version


def test_shorter_drafts_are_held_against_what_they_can_accept():
    mixed = SpeculationCounts((500, 0, 500), ((300, 0, 0), (0, 0, 0), (300, 200, 100)))
    for served in (counts(1000, 1, (600,), 3), mixed):
        found = watched(Probation(EXPECTED), served)
        assert found.kind is None
        assert found.numbers["canary/expected_length"] == pytest.approx(found.numbers["canary/served_length"])
    assert watched(Probation(EXPECTED), counts(1000, 2, (100, 0), 3)).kind == "rolled back"


def periodic(rollouts: int, easy: float = 0.96) -> list[StartAcceptance]:
    """Texts of two easy tokens and one that no draft gets right, over and over, 60 tokens each."""
    tokens = np.arange(60 + 3)
    easy_at = np.where(tokens % 3 == 2, 0.0, easy)
    table = np.stack([easy_at[k : k + 60] for k in range(3)])
    rows = np.repeat(np.arange(rollouts), 60)
    chances = torch.from_numpy(np.tile(table, rollouts))
    return [StartAcceptance(chances, chances, torch.from_numpy(rows), torch.arange(60).repeat(rollouts))]


@pytest.mark.parametrize("draft_tokens", [1, 2, 3])
def test_a_healthy_drafter_is_kept_on_text_whose_hard_tokens_come_in_a_rhythm(draft_tokens, monkeypatch):
    """The first draft token is accepted in 0.92 of the steps at k = 3, and in 0.50 at k = 1: fewer, not as many."""
    monkeypatch.setattr(decision, "CANARY_TOLERANCE", 0.0)
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
    found = watched(Probation(promise), served)
    assert found.kind is None, found.reason
    assert found.numbers["canary/expected_length"] == pytest.approx(served.acceptance_length, rel=0.03)
    assert promise.rates[0][0] < 0.6 < 0.9 < promise.rates[2][0]


def test_little_evidence_does_not_prove_a_bad_publication():
    assert watched(Probation(EXPECTED), counts(3, 3, (0, 0, 0))).kind is None


def test_a_less_certain_expectation_or_fewer_prompts_lower_the_bound():
    bounds = [
        watched(Probation(expected((0.6, 0.4, 0.2), error)), AS_EXPECTED, num_prompts=n).numbers["canary/bound"]
        for error, n in [(0.01, 8), (0.1, 8), (0.1, 2)]
    ]
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) == 3
