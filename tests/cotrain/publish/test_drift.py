"""When the trainer works, in simulated runs whose policy stands still, moves away, or cannot be followed."""

import json
import math

import numpy as np
import pytest

from cotrain.config.gate import GateConfig
from cotrain.publish.drift import TrainTrigger
from cotrain.publish.expected import Estimate
from cotrain.publish.gate import Pace

DRIFT = GateConfig(train_when="drift")
PACE = Pace(
    tokens_per_step=2000, seconds_per_verification=0.02, steps=(0, 0, 0, 900)
)  # a step takes 40 s / acceptance length
NOISE, NUM_PROMPTS, CEILING = 0.04, 8, 2.6


def estimate(value: float) -> Estimate:
    return Estimate(value, NOISE, NUM_PROMPTS)


class Run:
    """A session closes `learns` of the gap to the ceiling and takes `seconds`."""

    def __init__(self, config=DRIFT, seconds=2.0, learns=0.5, seed=0):
        self.trigger = TrainTrigger(config, train_every=4)
        self.rng = np.random.default_rng(seed)
        self.seconds, self.learns, self.length, self.step = seconds, learns, CEILING, 0
        self.decisions = []

    def steps(self, count: int, drift: float = 0.0, served_shortfall: float = 0.0, pace=PACE) -> list[bool]:
        """drift: acceptance length lost in each step. Returns which steps trained."""
        for _ in range(count):
            self.step += 1
            self.length = max(1.0, self.length - drift)
            expected, served = self.length + self.rng.normal(0, NOISE, 2) - [0, served_shortfall]
            self.trigger.observe(estimate(expected), estimate(expected), estimate(served))
            decision = self.trigger.decide(self.step, pace)
            if decision.train:
                gain = self.learns * (CEILING - self.length)
                self.length += gain
                self.trigger.record_session(gain, self.seconds)
            self.decisions.append(decision)
        return [decision.train for decision in self.decisions[-count:]]


def test_fixed_cadences():
    assert all(Run(GateConfig(train_when="always")).steps(9))
    assert Run(GateConfig(train_when="every")).steps(9) == [False] * 3 + [True] + [False] * 3 + [True, False]


def test_trains_while_it_climbs_then_rests():
    run = Run()
    run.length = 1.2
    trained = run.steps(40)
    assert all(trained[:4])
    assert run.length == pytest.approx(CEILING, abs=0.1)
    assert sum(trained[10:]) <= 3  # the trial sessions, and drift seen by chance


def test_noise_is_taken_for_drift_no_more_often_than_alpha():
    run = Run(GateConfig(train_when="drift", drift_gap=0))
    run.steps(500)
    by_chance = [d for d in run.decisions if d.gap > d.gap_bound or d.shortfall > d.shortfall_bound]
    assert len(by_chance) / 500 <= 2 * DRIFT.drift_alpha  # two signs
    assert sum(d.train for d in run.decisions) <= 500 / DRIFT.explore_every + DRIFT.patience + len(by_chance)


def test_sudden_drift_is_noticed_and_followed_until_it_is_made_up():
    run = Run()
    run.steps(30)
    run.length -= 0.7
    trained = run.steps(30)
    assert any(trained[:4])
    assert run.length > CEILING - 0.15
    assert not all(trained)


def test_slow_drift_is_followed():
    """0.6 of acceptance length lost in 60 steps without training."""
    run = Run()
    run.steps(20)
    trained = run.steps(60, drift=0.01)
    assert run.length > CEILING - 0.35
    assert sum(trained) <= 30


def test_served_below_expected_starts_training():
    run = Run()
    run.steps(10)
    run.steps(1, served_shortfall=0.5)
    decision = run.decisions[-1]
    assert decision.train
    assert "served" in decision.reason
    assert decision.shortfall > decision.shortfall_bound > 0
    assert decision.metrics()["trigger/train"] == 1.0


def test_drift_that_training_cannot_mend_ends_after_patience():
    run = Run(learns=0.0)
    run.steps(30)
    run.length = 1.8
    trained = run.steps(DRIFT.ceiling_steps)
    assert DRIFT.patience <= sum(trained) <= DRIFT.patience + 1  # and one trial session
    assert "training does not help" in " ".join(d.reason for d in run.decisions[-DRIFT.ceiling_steps :])


def test_training_that_costs_more_than_it_saves_is_only_tried_now_and_then():
    run = Run(seconds=1000.0, learns=1.0)
    run.length = 1.2
    run.steps(DRIFT.patience)
    assert sum(run.steps(60)) <= 60 / DRIFT.explore_every + DRIFT.patience


def test_a_trial_session_that_pays_starts_training_again():
    run = Run(learns=0.0)
    run.steps(10)
    assert not any(run.steps(5))
    run.learns, run.length = 0.3, 2.0
    run.trigger = fresh = TrainTrigger(DRIFT, 4)  # remembers no better level: nothing looks like drift
    for _ in range(DRIFT.patience):
        fresh.record_session(0.0, 2.0)
    trained = run.steps(DRIFT.explore_every + 2)
    assert trained == [False] * (DRIFT.explore_every - 1) + [True] * 3


def test_nothing_is_saved_while_nothing_is_drafted():
    run = Run(learns=0.2)
    run.length = 1.5
    run.steps(3)
    assert run.steps(1)[0]
    run.steps(1, pace=None)
    assert not run.decisions[-1].train
    assert run.decisions[-1].seconds_saved == 0.0


def test_a_session_at_no_cost_needs_a_gain_all_the_same():
    run = Run(seconds=0.0, learns=0.0)
    run.steps(3)
    assert sum(run.steps(15)) == 0


def test_steps_without_held_out_rollouts_count_by_what_was_served():
    trigger = TrainTrigger(DRIFT, 1)
    for served in [2.6] * 10 + [1.5] * 4:
        trigger.observe(None, None, estimate(served))
    trigger.observe(None, None, None)
    for _ in range(3):
        trigger.record_session(0.0, 1.0)
    assert trigger.decide(15, PACE).gap == pytest.approx(1.1)


def test_continues_exactly():
    run, saved = Run(), Run(seed=1)
    run.steps(25, drift=0.01)
    saved.trigger.observe(estimate(9.0), estimate(9.0), None)  # forgotten on load
    saved.trigger.load_state(json.loads(json.dumps(run.trigger.state())))
    for trigger in (run.trigger, saved.trigger):
        trigger.observe(estimate(2.3), estimate(2.3), estimate(2.0))
    assert saved.trigger.decide(26, PACE) == run.trigger.decide(26, PACE)
    assert saved.trigger.state() == run.trigger.state()


@pytest.mark.parametrize(
    ("gain", "seconds", "message"), [(math.nan, 1.0, "gain is nan"), (0.1, math.inf, "seconds is inf"),
                                     (0.1, -1.0, "seconds is -1.0")]
)  # fmt: skip
def test_sessions_must_be_measured(gain, seconds, message):
    with pytest.raises(ValueError, match=message):
        TrainTrigger(DRIFT, 1).record_session(gain, seconds)
