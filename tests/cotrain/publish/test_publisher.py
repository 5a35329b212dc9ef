"""The drafter's part of a run against a simulated trainer and simulated engines."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.publish.acceptance import expected_of
from cotrain.publish.alarms import Alarm, DrafterAlarm
from cotrain.publish.evidence import FreshScores
from cotrain.publish.investment import Spent
from cotrain.publish.publisher import Publisher, PublisherSpec
from cotrain.records import GainReport, RolloutBatch, WeightPayload
from tests.cotrain.publish.simulated import sample_rollouts, score
from tests.cotrain.publish.simulated_run import GOOD, PROMPTS, RANDOM, SAMPLES, World


@pytest.fixture
def new_publisher(run_config: Any, tmp_path: Path) -> Any:
    """The publisher of a run whose [drafter] has these fields, in a world."""

    def build(world: World, **drafter: Any) -> Publisher:
        config = run_config(
            steps=100,
            rollout={"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
            drafter={"model": {"type": "eagle3"}, **drafter},
        )
        world.current.record_drafter(WeightPayload("", 0, {"fc.weight": str(world.serving)}), world.serving)
        return Publisher(PublisherSpec(config.drafter, config.steps), world, world, tmp_path, world.current)

    return build


def run(publisher: Publisher, world: World, steps: Any) -> list[SimpleNamespace]:
    """As the controller does it; metrics and events of each step."""
    rows = []
    for step in steps:
        batch = world.generate(step)
        metrics, events = {}, []
        if publisher.mode is None:
            world.current.record_policy(None, step - 1)
            outcome = publisher.evaluate(step, batch)
            if outcome.failure is not None:
                raise outcome.failure
            if outcome.trains:
                world.train(step, 1)
            metrics, events = outcome.metrics, outcome.events
        length = batch.speculation.acceptance_length
        rows.append(SimpleNamespace(metrics=metrics, events=events, length=length, serving=world.serving))
    return rows


def kinds(rows: list[SimpleNamespace]) -> list[list[str]]:
    return [[event.kind for event in row.events] for row in rows]


@pytest.mark.parametrize("seed", range(4))
def test_a_random_drafter_that_learns_is_published_from_the_first_useful_weights_on(
    new_publisher: Any, seed: int
) -> None:
    """12 steps of 8 prompts x 4 samples, as the quickstart has them. Acceptance lengths rise from 1.00 to about 2.3."""
    world = World(learns=0.0, seed=seed)
    publisher, rows = new_publisher(world), []
    for step in range(1, 13):
        rows += run(publisher, world, [step])
        world.skill = 1.2 - 4.0 * 0.75**step  # trained in this step
    assert [row.serving for row in rows[:2]] == [0, 1]  # what step 1 trained, step 2 judges and step 3 serves
    assert rows[-1].serving >= 5
    assert not any(kind in ("refused", "rolled back", "alarm") for row in kinds(rows) for kind in row)
    assert rows[-1].length > 1.8
    lag = [row.metrics["gate/candidate_length"] - row.metrics["gate/serving_length"] for row in rows[2:]]
    assert max(lag) < 0.5  # what is kept back is never much


def test_rollouts_are_scored_and_weights_frozen_before_they_are_trained_on(new_publisher: Any) -> None:
    world = World(learns=9.0)
    run(new_publisher(world), world, [1, 2])
    assert world.calls == ["take_in", "train", "take_in", "publish", "train"]
    assert world.published[1] == (RANDOM + 9.0, 1) and world.skill == RANDOM + 18.0


def test_engines_are_told_what_to_expect_of_a_publication_and_nothing_of_a_drafter_that_comes_back(
    new_publisher: Any,
) -> None:
    """So that it is switched on where it pays before trials find that out."""
    world = World(GOOD, learns=1.0)
    world.served_as[1] = -5.0
    publisher = new_publisher(world)
    rows = run(publisher, world, [1, 2])
    assert kinds(rows)[1] == ["published"]
    assert 1 + sum(world.sent_rates) == pytest.approx(rows[1].metrics["gate/candidate_length"])
    assert len(world.sent_rates) == 3 and sorted(world.sent_rates, reverse=True) == world.sent_rates
    assert kinds(run(publisher, world, [3])) == [["rolled back"]] and world.sent_rates is None


def test_a_worse_candidate_is_kept_back_and_says_why(new_publisher: Any) -> None:
    world = World(GOOD, learns=-0.8)
    rows = run(new_publisher(world), world, range(1, 6))
    assert kinds(rows) == [[], *[["kept back"]] * 4]
    event = rows[1].events[0]
    assert event.in_short() == "drafter kept back, no gain above the margin of 0.02 is certain"
    assert event.numbers["gate/gain"] < 0 and event.version == 0
    assert rows[1].metrics["gate/publish"] == 0.0 and rows[1].metrics["drafter/published"] == 0.0
    assert world.serving == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_bad_publication_is_taken_back_within_two_steps_under_a_new_version(new_publisher: Any, seed: int) -> None:
    world = World(GOOD, learns=1.0, seed=seed)
    world.served_as[1] = -5.0  # promised well, served badly: something between trainer and engine is wrong
    rows = run(new_publisher(world), world, range(1, 5))
    assert kinds(rows)[1] == ["published"]
    step = next(i for i, row in enumerate(rows) if "rolled back" in [event.kind for event in row.events])
    assert step in (2, 3)
    assert rows[step].serving == 2 and world.published[2][0] == GOOD
    assert world.calls[-1] != "publish" and "publish 0" in world.calls and "reset" in world.calls
    assert rows[step].metrics["drafter/rolled_back"] == 1.0 and rows[step].metrics["canary/roll_back_to"] == 0.0
    assert "back to 0" in rows[step].events[0].reason


def test_engines_that_refuse_keep_what_they_have_and_the_run_goes_on(new_publisher: Any) -> None:
    world = World(learns=9.0)
    world.refuses = {1}
    rows = run(new_publisher(world), world, range(1, 4))
    assert kinds(rows) == [[], ["refused"], ["published"]]
    assert "engine 1: fc.weight has non-finite values" in rows[1].events[0].reason
    assert [row.serving for row in rows] == [0, 0, 2]


def test_small_steps_are_judged_together(new_publisher: Any) -> None:
    """Steps of 8 rollouts, of which two suffice. Each candidate is judged once, and nothing is said meanwhile."""
    world = World(GOOD, learns=0.3, prompts=4, samples=2)
    publisher = new_publisher(world)
    rows = run(publisher, world, range(1, 14))
    judged = [row.metrics["gate/num_rollouts"] for row in rows if "gate/num_rollouts" in row.metrics]
    assert judged == [8.0, 16.0] * 6 and kinds(rows)[1::2] == [[]] * 6
    assert all(len(kind) == 1 for kind in kinds(rows)[2::2]) and "gate/publish" not in rows[1].metrics
    resumed, again = new_publisher(world), new_publisher(world)
    resumed.load_state(json.loads(json.dumps(publisher.state())))
    assert resumed.serving == publisher.serving != again.serving


def test_rollouts_whose_features_never_come_are_lag(new_publisher: Any) -> None:
    world = World(GOOD, learns=0.3)
    generate = world.generate
    world.generate = lambda step: replace(generate(step), features=[])  # type: ignore[method-assign]
    with pytest.raises(
        DrafterAlarm, match=r"drafter_lags: .* in 5 steps with enough rollouts .* or rollouts lack features"
    ):
        run(new_publisher(world), world, range(1, 10))


def test_steps_that_could_not_judge_a_candidate_are_no_lag(new_publisher: Any) -> None:
    world = World(GOOD, learns=0.0, prompts=4, samples=1, lengths=lambda rng, number: rng.integers(0, 2, number))
    rows = run(new_publisher(world), world, range(1, 60))
    assert sum("gate/publish" in row.metrics for row in rows) < 20, "most steps only add to the rollouts of others"
    assert not any(kind in ("refused", "alarm") for row in kinds(rows) for kind in row)


def test_a_publication_is_taken_to_serve_as_long_as_the_one_before(new_publisher: Any) -> None:
    saved = []
    for samples in (4, 2):
        world = World(GOOD, learns=1.0, prompts=4, samples=samples)
        rows = run(new_publisher(world), world, [1, 2, 3])
        [found] = [row.metrics for row in rows if "gate/publish" in row.metrics][:1]
        share = found["gate/seconds_saved"] / (1 - found["gate/serving_length"] / found["gate/candidate_length"])
        tokens = sum(len(r.token_ids) for r in world.generate(2 if samples == 4 else 3).rollouts)
        saved.append(share / (tokens * 0.05))
    assert saved == pytest.approx([2, 3], rel=1e-6)


def test_training_waits_while_a_round_costs_more_than_it_would_save(new_publisher: Any) -> None:
    """Waiting is no lag, however long; a run that is resumed knows what rounds have brought."""
    world = World(-1.0, learns=0.3)
    publisher, costly = (
        new_publisher(world, updates_per_step=1),
        Spent(round=2000.0, rounds=3, step=50.0, elapsed=100.0),
    )

    def evaluate(publisher: Publisher, step: int, spent: Spent) -> Any:
        batch = world.generate(step)
        world.current.record_policy(None, step - 1)
        outcome = publisher.evaluate(step, batch, spent)
        if outcome.trains:
            world.train(step, 1)
        return outcome

    first = [evaluate(publisher, step, replace(costly, round=0.01)) for step in range(1, 5)]
    assert all(outcome.trains and not outcome.waits for outcome in first) and world.serving > 0
    later = [evaluate(publisher, step, costly) for step in range(5, 20)]
    assert not any(outcome.trains or outcome.failure for outcome in later)
    assert all(outcome.waits.startswith("drafter waits: a round costs 2e+03 s and would save ") for outcome in later)
    assert later[-1].metrics["time/round_costs_s"] == 2000 > later[-1].metrics["time/round_saves_s"] > 0
    assert sum(outcome.metrics["time/training_return_s"] for outcome in later) > 0
    resumed, always = new_publisher(world), new_publisher(world, train_when="always")
    resumed.load_state(json.loads(json.dumps(publisher.state())))
    assert resumed._investment.invested == publisher._investment.invested != 0
    assert evaluate(always, 20, costly).trains


def test_what_a_round_has_brought_is_known_where_none_is_due_in_the_step_that_judges_it(new_publisher: Any) -> None:
    world, cheap = World(-1.0, learns=0.3), Spent(last=0.5, round=0.01, rounds=3, step=50.0, elapsed=100.0)
    publisher = new_publisher(world, updates_per_step=1, train_every=2)
    for step in range(1, 6):
        batch = world.generate(step)
        world.current.record_policy(None, step - 1)
        outcome = publisher.evaluate(step, batch, cheap)
        assert outcome.trains == (step % 2 == 0) and not outcome.waits
        if outcome.trains:
            world.train(step, 1)
    assert len(publisher._investment.gains) == 2 and publisher._investment.ahead > 0
    assert "time/training_cost_s" in outcome.metrics, "rounds are charged in every step"


def test_each_training_round_makes_one_candidate(new_publisher: Any) -> None:
    world = World(GOOD, learns=-1.0)
    rows = run(new_publisher(world, train_every=3), world, range(1, 9))
    assert kinds(rows) == [[], [], [], ["kept back"], [], [], ["kept back"], []]


def test_zero_acceptance_of_a_good_drafter_ends_the_run(new_publisher: Any) -> None:
    world = World(GOOD)
    world.served_as[0] = -30.0
    outcome = new_publisher(world).evaluate(1, world.generate(1))
    assert str(outcome.failure).startswith("step 1 raised acceptance_collapsed")
    assert [event.kind for event in outcome.events] == ["alarm"] and outcome.metrics["alarms/acceptance_collapsed"] == 1


def test_or_it_goes_on_without_speculation_and_says_so(new_publisher: Any) -> None:
    world = World(GOOD)
    world.served_as[0] = -30.0
    publisher = new_publisher(world, on_drafter_failure="continue")
    rows = run(publisher, world, [1, 2, 3])
    assert kinds(rows) == [["alarm"], [], []]
    assert publisher.mode == "without speculation since step 1 (acceptance_collapsed)"
    assert world.num_speculative_tokens == 0 and world.calls == ["take_in"]
    assert rows[0].metrics["alarms/acceptance_collapsed"] == 1.0
    again = new_publisher(world, on_drafter_failure="continue")
    world.num_speculative_tokens = 3
    again.load_state(json.loads(json.dumps(publisher.state())))
    assert (again.mode, world.num_speculative_tokens) == (publisher.mode, 0)


def test_a_healthy_run_raises_no_alarm(new_publisher: Any) -> None:
    world = World(GOOD, learns=0.0)
    assert "alarm" not in [kind for row in kinds(run(new_publisher(world), world, range(1, 31))) for kind in row]


def test_lost_weights_are_found_by_reading_them_back(new_publisher: Any) -> None:
    world = World(GOOD)
    publisher = new_publisher(world, train=False)
    world.lost = True
    run(publisher, world, range(1, 10))
    with pytest.raises(DrafterAlarm, match=r"weights_differ: engines \[0, 1\] serve 1 drafter tensors otherwise"):
        run(publisher, world, [10])


def test_a_drafter_that_is_no_longer_judged_raises_the_lag_alarm(new_publisher: Any) -> None:
    """Every candidate has weights that are not finite: the policy moves away from the drafter that serves."""
    world = World(GOOD, learns=0.0)
    take_in = world.take_in

    def broken(*arguments: Any) -> Any:
        scores, metrics = take_in(*arguments)
        for scored in scores.candidate or []:
            scored.known[:] = 0
        return scores, metrics

    world.take_in = broken  # type: ignore[method-assign]
    publisher = new_publisher(world)
    rows = run(publisher, world, range(1, 6))
    assert kinds(rows) == [[], *[["refused"]] * 4]
    assert "acceptances of the candidate are not finite on 32 of 32 rollouts" in rows[1].events[0].reason
    with pytest.raises(
        DrafterAlarm, match="drafter_lags: no candidate was compared with the serving drafter in 5 steps"
    ):
        run(publisher, world, [6])


def test_a_frozen_drafter_is_watched_but_neither_trained_nor_judged(new_publisher: Any) -> None:
    world = World(GOOD)
    rows = run(new_publisher(world, train=False), world, range(1, 5))
    assert world.calls == ["take_in"] * 4 and kinds(rows) == [[]] * 4
    assert rows[0].metrics["rollout/expected_acceptance_length"] == pytest.approx(rows[0].length, abs=0.3)
    assert rows[0].metrics["rollout/expected_rate_pos_1"] > rows[0].metrics["rollout/expected_rate_pos_3"]


def test_a_step_is_expected_to_accept_what_drafts_of_its_length_do(new_publisher: Any) -> None:
    world = World(GOOD)
    world.num_speculative_tokens = 1
    rows = run(new_publisher(world, train=False), world, range(1, 5))
    metrics = rows[0].metrics
    assert metrics["rollout/expected_acceptance_length"] == pytest.approx(rows[0].length, abs=0.15)
    assert metrics["rollout/expected_acceptance_length_longest"] > metrics["rollout/expected_acceptance_length"] + 0.3


def test_drafts_that_were_verified_are_judged_whatever_the_controller_reports(new_publisher: Any) -> None:
    """Drafts can be verified in steps that also compute prompts, of which the controller counts nothing."""
    world = World(GOOD)
    world.served_as[0] = -30.0
    generate, nothing = world.generate, GainReport(10.0, 10.0)
    world.generate = lambda step: replace(generate(step), gain=nothing)  # type: ignore[method-assign]
    with pytest.raises(DrafterAlarm, match="acceptance_collapsed"):
        run(new_publisher(world), world, [1])


def test_acceptance_is_expected_of_the_rollouts_that_the_serving_drafter_drafted_for(new_publisher: Any) -> None:
    """Beside a publication in mid-generation, rollouts of both drafters end in one step, and only one side counts."""
    world = World(GOOD)
    publisher, batch = new_publisher(world), world.generate(1)
    scores, metrics = world.take_in(batch.features, 0, {0}, 0)
    long = [rollout.prompt_id in "0123" for rollout in batch.rollouts]  # of another drafter, and with other lengths
    for scored in scores.serving:
        scored.accepted[np.array(long)] *= 0
    scores.served_by[:] = [1 if other else 0 for other in long]
    world.take_in = lambda *_: (scores, metrics)  # type: ignore[method-assign]
    outcome = publisher.evaluate(1, batch)
    mine = [not other for other in long]
    expected = expected_of(scores.serving, scores.prompts, np.array(mine))
    assert outcome.metrics["rollout/expected_acceptance_length_longest"] == expected.longest > 1.8


def test_always_publishes_what_no_rollout_can_judge(new_publisher: Any) -> None:
    for mode, serving in (("always", 1), ("gain", 0)):
        world = World(learns=9.0)
        publisher = new_publisher(world, gate={"publish_when": mode})
        run(publisher, world, [1])
        nothing = score(sample_rollouts(np.random.default_rng(0), 8, 4), 0.0, np.random.default_rng(0))
        for scored in nothing:
            scored.steps[:], scored.accepted[:], scored.known[:] = float("nan"), float("nan"), 0
        world.take_in = lambda *_, nothing=nothing: (FreshScores([*"abcdefgh"] * 4, nothing, nothing, 1, [0] * 32), {})  # type: ignore[method-assign]
        [row] = run(publisher, world, [2])
        assert row.serving == serving
        assert "0 rollouts of 0 prompts could be scored" in row.events[0].reason


def test_speculation_switched_off_by_its_controller_is_no_alarm(new_publisher: Any) -> None:
    """The gate goes on: a candidate is scored by a forward pass, not by what is served."""
    world = World(learns=9.0)
    publisher = new_publisher(world)
    generate, off = world.generate, GainReport(10.0, 10.0)

    def undrafted(step: int) -> RolloutBatch:
        world.num_speculative_tokens = 0
        batch = generate(step)
        return RolloutBatch(batch.rollouts, batch.features, batch.seconds, batch.num_generated_tokens, {}, off)

    world.generate = undrafted  # type: ignore[method-assign]
    rows = run(publisher, world, range(1, 4))
    assert kinds(rows) == [[], ["published"], ["published"]]


def test_a_resumed_publisher_decides_as_one_that_was_never_stopped(new_publisher: Any) -> None:
    def events(rows: list[SimpleNamespace]) -> list[Any]:
        return [event for row in rows for event in row.events]

    straight = World(-2.0, learns=0.4)
    expected = events(run(new_publisher(straight), straight, range(1, 13)))
    world = World(-2.0, learns=0.4)
    first = new_publisher(world)
    found = events(run(first, world, range(1, 6)))
    second = new_publisher(world)
    second.load_state(json.loads(json.dumps(first.state())))
    assert found + events(run(second, world, range(6, 13))) == expected
    assert {event.kind for event in expected} >= {"published"}


def test_an_alarm_of_another_check_stops_the_step(new_publisher: Any) -> None:
    world = World(GOOD, learns=1.0)
    publisher = new_publisher(world)
    run(publisher, world, [1])
    alarm = Alarm("not_lossless", "rollouts have another law", {"p": 0.0})
    outcome = publisher.heed(2, [alarm])
    assert "not_lossless: rollouts have another law" in str(outcome.failure)
    assert [event.kind for event in outcome.events] == ["alarm"] and outcome.metrics == {"alarms/not_lossless": 1.0}
    going_on = new_publisher(world, on_drafter_failure="continue")
    assert going_on.heed(2, [alarm]).failure is None
    assert going_on.mode == "without speculation since step 2 (not_lossless)" and world.num_speculative_tokens == 0
    assert going_on.heed(3, [replace(alarm, fatal=True)]).failure is not None
