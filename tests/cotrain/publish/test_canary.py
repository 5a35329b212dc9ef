"""The canary: what it makes of the first steps after a publication, and what is remembered of the versions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain.publish.acceptance import expected_of
from cotrain.publish.decision import Outcome, decide
from cotrain.publish.evidence import CANARY_STEPS, Publication
from cotrain.records import SpeculationCounts
from drafters.acceptance import StartAcceptance, rollout_acceptances
from tests.cotrain.publish.test_alarms import DRAFTER, PROMISE, RANDOM_DRAFTER, dead, evidence, generated, rollout
from tests.speculation_counts import counts, expected, steps_of

FIRST = Publication(last_good=4, unjudged=3)
WATCHED = FIRST.published(4, 5, 0.1, scored=True)


def step(serving: Publication, rate: float = 0.42, seed: int = 0, **changes: object) -> Outcome:
    """A step of the serving drafter, where PROMISE is expected: rates of 0.4, 0.2, 0.1."""
    rollouts = generated(np.random.default_rng(seed), rate) if rate else dead()
    return decide(evidence(rollouts, serving=serving, **changes), DRAFTER, 1000)


def test_a_publication_is_kept_after_its_last_watched_step() -> None:
    serving, kinds = WATCHED, []
    for seed in range(CANARY_STEPS + 1):
        decision = step(serving, seed=seed)
        serving = decision.serving
        kinds.append([event.kind for event in decision.events])
    assert kinds == [[]] * (CANARY_STEPS - 1) + [["kept"], []]
    assert (serving.last_good, serving.watched) == (5, 0)


@pytest.mark.parametrize(
    ("rate", "found"), [(0.0, "no draft token was accepted"), (0.15, "served acceptance length 1.1")]
)
def test_a_publication_that_serves_worse_goes_back_to_the_last_good_version(rate: float, found: str) -> None:
    decision = step(WATCHED, rate)
    [event] = decision.events
    assert event.kind == "rolled back" and f"version 5: {found}" in event.reason and "back to 4" in event.reason
    assert decision.metrics["canary/roll_back_to"] == 4.0
    assert decision.metrics["canary/served_length"] < decision.metrics["canary/expected_length"]
    assert decision.serving.rolled_back(6, 0.1) == replace(WATCHED, last_good=6, watched=0)


def test_healthy_publications_are_rolled_back_no_more_often_than_stated() -> None:
    rolled_back = sum(bool(step(WATCHED, seed=seed).events) for seed in range(100))
    assert rolled_back <= 3  # 2 % over four steps


@pytest.mark.parametrize(("rate", "last_good"), [(None, 4), (0.42, 5)])
def test_a_version_replaced_while_watched_is_good_if_it_was_served_well(rate: float | None, last_good: int) -> None:
    serving = WATCHED if rate is None else step(WATCHED, rate).serving
    assert serving.published(5, 6, 0.1, scored=True).last_good == last_good


def test_a_version_that_could_not_be_scored_is_not_watched() -> None:
    serving = FIRST.published(4, 5, 0.1, scored=False)
    assert (serving.last_good, serving.watched, serving.unjudged) == (5, 0, 0)


@pytest.mark.parametrize("promise", [None, PROMISE])
def test_a_step_that_says_nothing_is_not_counted(promise: object) -> None:
    """Nothing is expected, or drafting paused in every rollout."""
    paused = [rollout(f"p{p}", 0, 40, (9, 0, 0), paused=99) for p in range(8)]
    rollouts = dead() if promise is None else paused
    decision = decide(evidence(rollouts, serving=WATCHED, expected=promise), DRAFTER, 1000)
    assert (decision.events, replace(decision.serving, unjudged=0, served=0)) == ([], WATCHED)


def test_a_random_drafter_that_serves_nothing_is_kept() -> None:
    decision = step(WATCHED, 0.0, expected=RANDOM_DRAFTER)
    assert decision.events == [] and decision.serving.watched == CANARY_STEPS - 1


def test_shorter_drafts_are_held_against_what_they_can_accept() -> None:
    promise = expected((0.6, 0.4, 0.2))
    mixed = SpeculationCounts(steps_of(500, 1, (300,)) + steps_of(500, 3, (300, 200, 100)))
    for served in (counts(1000, 1, (600,)), mixed):
        assert promise.length_at(served.steps) == pytest.approx(served.acceptance_length)


def periodic(rollouts: int, easy: float = 0.96) -> list[StartAcceptance]:
    """Texts of two easy tokens and one that no draft gets right, over and over, 60 tokens each."""
    tokens = np.arange(60 + 3)
    easy_at = np.where(tokens % 3 == 2, 0.0, easy)
    table = np.stack([easy_at[k : k + 60] for k in range(3)])
    rows = np.repeat(np.arange(rollouts), 60)
    chances = torch.from_numpy(np.tile(table, rollouts))
    return [StartAcceptance(chances, chances, torch.from_numpy(rows), torch.arange(60).repeat(rollouts))]


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
def test_a_healthy_drafter_is_kept_on_text_whose_hard_tokens_come_in_a_rhythm(num_speculative_tokens):
    """The first draft token is accepted in 0.92 of the steps at k = 3, and in 0.50 at k = 1: fewer, not as many."""
    promise = expected_of(rollout_acceptances(periodic(24), 3), [str(i % 8) for i in range(24)])
    assert promise is not None
    rng, steps = np.random.default_rng(0), []
    for _ in range(32):
        start = 0
        while start < 60:
            taken = 0
            while taken < num_speculative_tokens and rng.random() < (0.0 if (start + taken) % 3 == 2 else 0.96):
                taken += 1
            steps.append((num_speculative_tokens, taken))
            start += 1 + taken
    served = SpeculationCounts(steps)
    assert promise.length_at(served.steps) == pytest.approx(served.acceptance_length, rel=0.03)
    assert served.acceptance_length > promise.lowest_served(served.steps, 8, tolerance=0.0, chance=0.01)
    assert promise.rates[0][0] < 0.6 < 0.9 < promise.rates[2][0]


def test_a_less_certain_expectation_or_fewer_prompts_lower_the_bound() -> None:
    bounds = [
        expected((0.6, 0.4, 0.2), error).lowest_served((0, 0, 100), n, tolerance=0.1, chance=0.01)
        for error, n in [(0.01, 8), (0.1, 8), (0.1, 2)]
    ]
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) == 3
