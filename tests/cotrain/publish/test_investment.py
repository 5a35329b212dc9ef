"""When a round of training pays: in runs drawn at random, and in those of a single kind."""

import random
from dataclasses import replace

import pytest

from benchmarks.training_pays import World, seconds_of
from cotrain.publish.investment import Investment, Prices, Spent, Verdict

WORLD = World(
    steps=100, other=0.3, draft_cost=1.2, start=1.3, limit=2.6, half=6.0, drift=0.0, round_s=0.03, swap_s=0.01
)
"""Training pays for a while here."""


def times(world: World, seed: int) -> dict[str, tuple[float, int]]:
    return {arm: seconds_of(world, arm, random.Random(seed)) for arm in ("none", "frozen", "always", "rule")}


def test_a_run_is_never_more_than_two_percent_slower_than_the_best_of_always_frozen_and_none() -> None:
    """Lengths, costs, acceptance, learning and drift of a run are drawn at random. `python -m benchmarks.training_pays` draws more."""
    worst, total, rng = (0.0, WORLD), 0.0, random.Random(11)
    for number in range(25):
        world = World.drawn(rng)
        seconds = {arm: found[0] for arm, found in times(world, number).items()}
        loss = seconds.pop("rule") / min(seconds.values()) - 1
        worst, total = max(worst, (loss, world), key=lambda one: one[0]), total + loss
    print(f"worst: {worst[0]:+.1%} in {worst[1]}")
    assert worst[0] <= 0.02, worst
    assert total / 25 < 0


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_a_weak_start_is_trained_until_that_pays_no_more(drift: float) -> None:
    seconds = times(replace(WORLD, drift=drift), 0)
    assert seconds["rule"][0] < 0.9 * seconds["frozen"][0] and seconds["rule"][0] <= seconds["always"][0]
    assert 5 < seconds["rule"][1] < 99


def test_a_drafter_that_is_as_good_as_it_gets_is_left_alone() -> None:
    done = replace(WORLD, start=2.6, round_s=0.2)
    seconds = times(done, 0)
    assert seconds["rule"][0] < 1.02 * seconds["frozen"][0] < 0.95 * seconds["always"][0]


def decide(left: int, spent: Spent, **state: float) -> Verdict:
    investment = Investment(**{"served": 1.5, "candidate": 1.5} | state)
    return investment.decide(Prices(WORLD.generation, 0.01, spent), left)


def test_rounds_begin_until_their_cost_is_known_and_end_before_the_run() -> None:
    unknown = [decide(50, Spent(rounds=rounds, step=1.0)) for rounds in range(3)]
    assert [verdict.trains for verdict in unknown] == [True, True, False]
    assert "a step without a round is measured" in unknown[2].reason
    known = Spent(round=0.01, rounds=3, step=1.0, elapsed=50.0)
    assert [decide(left, known).trains for left in (0, 1, 50)] == [False, False, True]
    assert "run ends" in decide(1, known).reason


def test_what_has_not_returned_is_bounded() -> None:
    known = Spent(round=0.01, rounds=3, step=1.0, elapsed=50.0)
    refused = decide(50, known, invested=1.5)
    assert not refused.trains and "but then 1.5 s were invested and not returned, of 1.5 s at most" in refused.reason
    assert decide(50, known, invested=1.4).trains
    costly = decide(50, replace(known, round=5.0))
    assert not costly.trains and costly.reason == f"a round costs 5 s and would save {costly.saves:.2g} s"


def test_gains_are_those_of_the_lead_on_the_same_rollouts_and_drift_is_what_serving_drafters_lose() -> None:
    investment = Investment()
    investment.observe(1.5, None, 0)
    investment.observe(1.4, 1.6, 1)
    investment.observe(1.3, 1.7, 2)
    assert investment.gains == [(pytest.approx(1.5), pytest.approx(0.2)), (pytest.approx(1.6), pytest.approx(0.1))]
    investment.published()
    investment.observe(1.68, None, 0)
    investment.observe(1.66, 1.86, 1)
    assert investment.gains[-1][1] == pytest.approx(0.2)
    lost, accepted = 0.1 + 0.1 + 0.02 + 0.02, 0.5 + 0.4 + 0.7 + 0.68
    assert investment.drift == pytest.approx(lost / (accepted + 1), rel=0.03), "a publication is no negative drift"
