"""Each alarm fires on its fault with cause and remedy, and a healthy drafter raises none at the stated rate."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.acceptance_stats import counts_of
from cotrain.config.schema import AlarmConfig, DrafterConfig
from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.publish.alarms import (
    ADVICE,
    FALSE_ALARM_RATE,
    LAG_ROUNDS,
    NUM_TESTS,
    DrafterAlarm,
    check_step,
    collapse_probability,
)
from cotrain.publish.evidence import Evidence, FreshScores, Publication
from cotrain.records import Rollout, RolloutBatch, Versions
from tests.publish_evidence import expected_from
from tests.speculation_counts import counts, steps_of
from tests.speculation_counts import expected as expected_acceptance

K = 3
DRAFTER = DrafterConfig(model={"type": "eagle3"})
SERVING = Publication(last_good=5)
VERSIONS = Versions(7, 5)
STEPS = 1000


def rollout(prompt: str, sample: int, num_drafts: int, accepted: tuple[int, ...], paused: int = 0) -> Rollout:
    """Drafting was off for `paused` of its tokens."""
    tokens = 1 + num_drafts + sum(accepted) + paused
    return Rollout(
        prompt, sample, [1, 2], [3] * tokens, [0.0] * tokens, "", "stop", VERSIONS, steps_of(num_drafts, K, accepted)
    )


def generated(rng, rate: float, prompts: int = 8, samples: int = 8, spread: float = 0.02) -> list[Rollout]:
    """Rollouts whose prompts, and whose rollouts of a prompt, differ in the rate; `spread` is either's variance over
    rate x (1 - rate). Draft token i is accepted with that rate when all before it were."""

    def around(mean: float) -> float:
        concentration = 1 / spread - 1
        return rng.beta(mean * concentration, (1 - mean) * concentration)

    out = []
    for p in range(prompts):
        prompt_rate = min(max(around(rate), 1e-4), 1 - 1e-4)
        for s in range(samples):
            own, drafts = around(prompt_rate), int(rng.integers(10, 60))
            reached = [drafts]
            for _ in range(K):
                reached.append(int(rng.binomial(reached[-1], own)))
            out.append(rollout(f"p{p}", s, drafts, tuple(reached[1:])))
    return out


PROMISE = expected_acceptance((0.4, 0.2, 0.1), 0.03, 8)
RANDOM_DRAFTER = expected_acceptance((0.0005, 0.0001, 0.0), 0.0004, 8)


def evidence(rollouts: list[Rollout], gain: Any = None, **changes: Any) -> Evidence:
    num_tokens = sum(len(r.token_ids) for r in rollouts)
    batch = RolloutBatch(rollouts, [], 1.0, num_tokens, gain=gain, speculation=counts_of(rollouts))
    scores = FreshScores([], [], None, 0, [])
    return replace(Evidence(1, batch, VERSIONS, SERVING, scores, PROMISE), **changes)


def alarms_of(step: Evidence, **drafter: Any) -> list[str]:
    return [alarm.name for alarm in check_step(step, DRAFTER.model_copy(update=drafter), STEPS)]


def healthy(rate: float = 0.42) -> list[Rollout]:
    return generated(np.random.default_rng(0), rate)


def dead(num_drafts: int = 40, prompts: int = 8, samples: int = 8) -> list[Rollout]:
    return [rollout(f"p{p}", s, num_drafts, (0,) * K) for p in range(prompts) for s in range(samples)]


def test_a_healthy_step_raises_nothing() -> None:
    assert alarms_of(evidence(healthy(), serving=replace(SERVING, unjudged=2))) == []


def test_zero_acceptance_of_a_drafter_that_had_some_is_an_alarm() -> None:
    [alarm] = check_step(evidence(dead()), DRAFTER, STEPS)
    assert alarm.name == "acceptance_collapsed"
    assert "2560 verification steps" in alarm.what
    assert alarm.numbers["expected_length"] == pytest.approx(1.7)
    assert "KV cache" in ADVICE[alarm.name]["cause"] and "aux_layers" in ADVICE[alarm.name]["remedy"]


def test_zero_acceptance_in_long_contexts_alone_is_an_alarm() -> None:
    short, few = healthy(0.5), [r for r in dead() if r.prompt_id == "p0"]
    deep = [replace(r, prompt_token_ids=[1] * 3000) for r in few]
    [alarm] = check_step(evidence([*short, *deep]), DRAFTER, STEPS)
    assert alarm.name == "acceptance_collapsed"
    assert "in 320 verification steps with 2048 tokens of context and more" in alarm.what
    assert alarms_of(evidence([*short, *few])) == [], "they are few, and as deep as the others"


def test_zero_acceptance_of_a_random_drafter_is_none_at_any_step() -> None:
    assert alarms_of(evidence(dead(), expected=RANDOM_DRAFTER)) == []
    assert alarms_of(evidence(dead(), expected=None)) == []


def test_rollouts_in_which_drafting_paused_are_not_judged() -> None:
    paused = [replace(r, token_ids=[3] * 500, log_probs=[0.0] * 500) for r in dead()]
    assert alarms_of(evidence(paused)) == []
    assert alarms_of(evidence([*paused, *dead()])) == ["acceptance_collapsed"]


def test_zero_acceptance_in_a_handful_of_drafts_can_be_chance() -> None:
    assert alarms_of(evidence(dead(num_drafts=2, prompts=2, samples=1))) == []


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("num_drafts", [5, 40])
def test_the_chance_of_zero_acceptance_is_that_of_a_simulation_or_more(rate: float, num_drafts: int) -> None:
    """Rollouts that are as much alike as assumed: the alarm is never quicker than their law."""
    rng, few = np.random.default_rng(1), expected_acceptance((rate, 0.0, 0.0), 0.0, 8)
    rates = rng.beta(rate * 4, (1 - rate) * 4, size=(100_000, 3))  # intraclass correlation 1 / (4 + 1)
    nothing = (rng.binomial(num_drafts, rates) == 0).all(axis=1).mean()
    chance = collapse_probability(few, counts(3 * num_drafts, K, (0,) * K), num_rollouts=3)
    assert nothing - 0.005 < chance < max(1.5 * nothing, nothing + 0.2)
    assert chance > (1 - rate) ** (3 * num_drafts), "drafts of a rollout fail together: more likely than one by one"


def test_served_far_below_expected_is_an_alarm_and_within_tolerance_none() -> None:
    assert alarms_of(evidence(healthy(0.15))) == ["acceptance_below_expected"]
    assert alarms_of(evidence(healthy(0.37)), alarms=AlarmConfig(tolerance=0.3)) == []


def test_few_prompts_say_too_little_about_noise() -> None:
    known_from_three = expected_acceptance((0.4, 0.2, 0.1), 0.03, 3)
    assert alarms_of(evidence(healthy(0.15), expected=known_from_three)) == []


def test_a_watched_drafter_is_left_to_its_canary() -> None:
    assert alarms_of(evidence(dead(), serving=replace(SERVING, watched=1))) == []


def test_drafts_are_judged_by_what_is_expected_at_their_own_length() -> None:
    """Text of two easy tokens and a hard one: position 1 is accepted far more often at k = 3 than at k = 1."""
    rates = np.array([[0.526, 0.0, 0.0], [0.94, 0.9, 0.0], [0.96, 0.92, 0.0]])
    periodic = ExpectedAcceptance(rates, np.repeat(rates.sum(1, keepdims=True), 8, axis=1))
    short = [
        replace(
            rollout(f"p{p}", s, 40, (0, 0, 0), paused=0),
            token_ids=[3] * 62,
            log_probs=[0.0] * 62,
            verification_steps=steps_of(40, 1, (21,)),
        )
        for p in range(8)
        for s in range(4)
    ]
    assert alarms_of(evidence(short, expected=periodic)) == []
    few = steps_of(40, 1, (4,))
    worse = [replace(r, verification_steps=few, token_ids=[3] * 45, log_probs=[0.0] * 45) for r in short]
    assert alarms_of(evidence(worse, expected=periodic)) == ["acceptance_below_expected"]
    long = [replace(r, verification_steps=steps_of(40, 3, (21, 0, 0))) for r in short]
    assert alarms_of(evidence(long, expected=periodic)) == ["acceptance_below_expected"]


@pytest.mark.parametrize("significance", [0.01, 0.05])
@pytest.mark.parametrize(("scored_prompts", "rate"), [(4, 0.4), (16, 0.4), (8, 0.1)])
def test_false_alarms_of_the_shortfall(significance: float, scored_prompts: int, rate: float) -> None:
    """Expectation and service of the same drafter, on other prompts, without any tolerance."""
    rng, runs = np.random.default_rng(2), 400
    fired = 0
    for _ in range(runs):
        expected, served = expected_from(generated(rng, rate, scored_prompts, 2)), generated(rng, rate, 8, 2)
        found = counts_of(served)
        fired += found.acceptance_length < expected.lowest_served(found.steps, 8, 0.0, significance)
    limit = runs * significance + 3 * math.sqrt(runs * significance)
    assert fired <= limit


def test_false_alarms_of_healthy_drafters_over_runs() -> None:
    """Good, weak and all but random ones: in 600 steps, each of a run of 10 whose rate is 1 %, next to none."""
    rng, fired = np.random.default_rng(3), 0
    drafter = DRAFTER.model_copy(update={"alarms": AlarmConfig(tolerance=0)})
    for rate in (0.6, 0.1, 0.002):
        for _ in range(200):
            step = evidence(generated(rng, rate, 8, 2), expected=expected_from(generated(rng, rate, 4, 2)))
            fired += bool(check_step(step, drafter, 10))
    assert fired <= 3


def test_a_lost_half_of_the_gain_is_found_within_two_steps() -> None:
    rng = np.random.default_rng(4)
    found = 0
    for _ in range(40):
        raised = []
        for _ in range(2):
            expected = expected_from(generated(rng, 0.55, 16, 4, spread=0.005))
            raised += alarms_of(evidence(generated(rng, 0.33, 16, 4, spread=0.005), expected=expected))
        assert set(raised) <= {"acceptance_below_expected"}
        found += bool(raised)
    assert found >= 38


def test_speculation_on_without_draft_tokens_is_an_alarm() -> None:
    nothing = [rollout("p0", s, 0, (), paused=63) for s in range(4)]
    [alarm] = check_step(evidence(nothing), DRAFTER, STEPS)
    assert alarm.name == "no_draft_tokens"
    assert "256 tokens" in alarm.what
    for longest, found in ((0, []), (2, ["no_draft_tokens"])):
        assert alarms_of(evidence(nothing, SimpleNamespace(longest_draft=longest))) == found
    assert alarms_of(evidence([rollout("p0", 0, 0, ())])) == [], "a prefill alone drafts nothing"


@pytest.mark.parametrize(
    ("drafter", "allowed"),
    [({}, LAG_ROUNDS), ({"train_every": 3}, 3 * LAG_ROUNDS), ({"train": False}, 999)],
)
def test_lag_over_its_limit_is_an_alarm(drafter: dict[str, Any], allowed: int) -> None:
    def after(lag: int) -> list[str]:
        return alarms_of(evidence(healthy(), serving=replace(SERVING, unjudged=lag)), **drafter)

    assert after(allowed) == []
    assert after(allowed + 1) == ([] if drafter == {"train": False} else ["drafter_lags"])


def test_each_engine_must_serve_what_was_sent() -> None:
    sent = {"fc.weight": "a", "norm.weight": "b"}
    same, lost, absent = dict(sent), sent | {"norm.weight": "c"}, {"fc.weight": "a"}
    assert alarms_of(evidence(healthy(), sent=sent, served=[same, same])) == []
    for other in (lost, absent):
        [alarm] = check_step(evidence(healthy(), sent=sent, served=[same, other]), DRAFTER, STEPS)
        assert (alarm.name, alarm.fatal) == ("weights_differ", False)
        assert "engines [1]" in alarm.what
        assert "norm.weight" in alarm.what


def test_a_rollout_of_another_version_is_an_alarm_and_of_another_policy_a_fatal_one() -> None:
    rollouts = healthy()
    for other, fatal in ((Versions(7, 4), False), (Versions(6, 5), True)):
        [alarm] = check_step(evidence([*rollouts[1:], replace(rollouts[0], versions=other)]), DRAFTER, STEPS)
        assert (alarm.name, alarm.fatal) == ("wrong_version", fatal)
        assert str(other) in alarm.what
        assert ("on_drafter_failure" in str(DrafterAlarm(3, [alarm]))) is not fatal


def test_the_failure_names_cause_and_remedy_and_the_way_on() -> None:
    text = str(DrafterAlarm(12, check_step(evidence(dead(), serving=replace(SERVING, unjudged=9)), DRAFTER, STEPS)))
    assert text.startswith("step 12 raised drafter_lags, acceptance_collapsed")
    assert text.count("Probable cause: ") == text.count("Remedy: ") == 2
    assert 'on_drafter_failure = "continue"' in text


def test_the_false_alarm_rate_is_that_of_a_run() -> None:
    """The same unlucky step is an alarm in a short run, and chance in a long one."""
    rollouts = dead(num_drafts=9, prompts=8, samples=1)
    chance = collapse_probability(PROMISE, counts(72, K, (0,) * K), num_rollouts=8)
    steps = int(FALSE_ALARM_RATE / NUM_TESTS / chance)
    assert steps >= 1
    assert [len(check_step(evidence(rollouts), DRAFTER, n)) for n in (steps, steps + 1)] == [1, 0]
