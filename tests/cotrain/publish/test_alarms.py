"""Each alarm fires on its fault with cause and remedy, and a healthy drafter raises none at the stated rate."""

import math
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from cotrain.config.alarm import AlarmConfig
from cotrain.config.schema import DrafterConfig
from cotrain.publish.alarms import (
    Delivery,
    DrafterAlarm,
    StepRecord,
    check_step,
    collapse_probability,
    lag_limit,
    respond,
    shortfall_bound,
)
from cotrain.publish.expected import ExpectedAcceptance, served_length
from cotrain.records import Rollout, Versions
from cotrain.rollout.acceptance_stats import total_counts
from tests.speculation_counts import counts as counts_of
from tests.speculation_counts import expected as expected_acceptance

K = 3
VERSIONS = Versions(7, 5)
STEPS = 1000


def rollout(prompt: str, sample: int, num_drafts: int, accepted: tuple[int, ...], paused: int = 0) -> Rollout:
    """Drafting was off for `paused` of its tokens."""
    counts = counts_of(num_drafts, K, accepted) if num_drafts else None
    tokens = 1 + num_drafts + sum(accepted) + paused
    return Rollout(prompt, sample, [1, 2], [3] * tokens, [0.0] * tokens, "", "stop", VERSIONS, counts)


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


def promised(rollouts: list[Rollout]) -> ExpectedAcceptance:
    """What a hold-out with these counts would promise."""
    counts, length = total_counts(r.speculation for r in rollouts), served_length(rollouts)
    assert counts is not None and length is not None
    rates = [accepted / counts.num_drafts for accepted in counts.accepted_per_position]
    return expected_acceptance(rates, length.standard_error, length.num_groups)


PROMISE = expected_acceptance((0.4, 0.2, 0.1), 0.03, 8)
RANDOM_DRAFTER = expected_acceptance((0.0005, 0.0001, 0.0), 0.0004, 8)


def record(rollouts: list[Rollout], **changes) -> StepRecord:
    return StepRecord(**{"rollouts": rollouts, "versions": VERSIONS, "draft_length": K, "expected": PROMISE} | changes)


def alarms_of(step: StepRecord, **config) -> list[str]:
    return [alarm.name for alarm in check_step(step, AlarmConfig(**config), 2, STEPS)]


def healthy(rate: float = 0.42) -> list[Rollout]:
    return generated(np.random.default_rng(0), rate)


def dead(num_drafts: int = 40, prompts: int = 8, samples: int = 8) -> list[Rollout]:
    return [rollout(f"p{p}", s, num_drafts, (0,) * K) for p in range(prompts) for s in range(samples)]


def test_a_healthy_step_raises_nothing() -> None:
    assert alarms_of(record(healthy(), lag_versions=2)) == []


def test_zero_acceptance_of_a_drafter_that_had_some_is_an_alarm() -> None:
    [alarm] = check_step(record(dead()), AlarmConfig(), 2, STEPS)
    assert alarm.name == "acceptance_collapsed"
    assert "2560 verification steps" in alarm.what
    assert alarm.numbers["expected"] == pytest.approx(1.7)
    assert "KV cache" in alarm.cause
    assert "last good drafter" in alarm.remedy


def test_zero_acceptance_of_a_random_drafter_is_none_at_any_step() -> None:
    assert alarms_of(record(dead(), expected=RANDOM_DRAFTER)) == []
    assert alarms_of(record(dead(), expected=None)) == []


def test_rollouts_in_which_drafting_paused_are_not_judged() -> None:
    paused = [replace(r, token_ids=[3] * 500, log_probs=[0.0] * 500) for r in dead()]
    assert alarms_of(record(paused)) == []
    assert alarms_of(record([*paused, *dead()])) == ["acceptance_collapsed"]


def test_zero_acceptance_in_a_handful_of_drafts_can_be_chance() -> None:
    assert alarms_of(record(dead(num_drafts=2, prompts=2, samples=1))) == []


def test_chance_of_zero_acceptance_is_that_of_a_simulation() -> None:
    """Rollouts that are as much alike as assumed: the law is exact."""
    rng, few = np.random.default_rng(1), expected_acceptance((0.1, 0.0, 0.0), 0.0, 8)
    rates = rng.beta(0.1 * 4, 0.9 * 4, size=(100_000, 3))  # intraclass correlation 1 / (4 + 1)
    nothing = (rng.binomial(5, rates) == 0).all(axis=1).mean()
    chance = collapse_probability(few, dead(num_drafts=5, prompts=3, samples=1))
    assert chance == pytest.approx(nothing, abs=0.005)
    assert chance > 0.9**15, "drafts of a rollout fail together: more likely than by the binomial law"


def test_served_far_below_expected_is_an_alarm_and_within_tolerance_none() -> None:
    assert alarms_of(record(healthy(0.15))) == ["acceptance_below_expected"]
    assert alarms_of(record(healthy(0.37)), tolerance=0.3) == []


def test_few_prompts_say_too_little_about_noise() -> None:
    few = [r for r in healthy(0.15) if r.prompt_id in ("p0", "p1", "p2")]
    held_out = expected_acceptance((0.4, 0.2, 0.1), 0.03, 3)
    assert shortfall_bound(PROMISE, few, 0.0, 0.1) == -math.inf
    assert shortfall_bound(held_out, healthy(0.15), 0.0, 0.1) == -math.inf
    assert alarms_of(record(few)) == []
    assert shortfall_bound(PROMISE, healthy(0.15), 0.0, 0.1) > 1


def test_drafts_are_judged_by_what_is_expected_at_their_own_length() -> None:
    """Text of two easy tokens and a hard one: position 1 is accepted far more often at k = 3 than at k = 1."""
    periodic = ExpectedAcceptance(
        ((0.526, 0.0, 0.0), (0.94, 0.9, 0.0), (0.96, 0.92, 0.0)), ((0.526,) * 8, (1.84,) * 8, (1.88,) * 8)
    )
    short = [
        replace(
            rollout(f"p{p}", s, 40, (0, 0, 0), paused=0),
            token_ids=[3] * 62,
            log_probs=[0.0] * 62,
            speculation=counts_of(40, 1, (21,), K),
        )
        for p in range(8)
        for s in range(4)
    ]
    assert alarms_of(record(short, expected=periodic)) == []
    worse = [replace(r, speculation=counts_of(40, 1, (4,), K), token_ids=[3] * 45, log_probs=[0.0] * 45) for r in short]
    assert alarms_of(record(worse, expected=periodic)) == ["acceptance_below_expected"]
    long = [replace(r, speculation=counts_of(40, 3, (21, 0, 0), K)) for r in short]
    assert alarms_of(record(long, expected=periodic)) == ["acceptance_below_expected"]


@pytest.mark.parametrize("significance", [0.01, 0.05])
@pytest.mark.parametrize(("holdout_prompts", "rate"), [(4, 0.4), (16, 0.4), (8, 0.1)])
def test_false_alarms_of_the_shortfall(significance: float, holdout_prompts: int, rate: float) -> None:
    """Promise and service of the same drafter, on other prompts, without any tolerance."""
    rng, runs = np.random.default_rng(2), 400
    fired = 0
    for _ in range(runs):
        expected, served = promised(generated(rng, rate, holdout_prompts, 2)), generated(rng, rate, 8, 2)
        counts = total_counts(r.speculation for r in served)
        assert counts is not None
        fired += counts.acceptance_length < shortfall_bound(expected, served, 0.0, significance)
    limit = runs * significance + 3 * math.sqrt(runs * significance)
    assert fired <= limit


def test_false_alarms_of_healthy_drafters_over_runs() -> None:
    """Good, weak and all but random ones: in 600 steps, each of a run of 10 whose rate is 1 %, next to none."""
    rng, fired = np.random.default_rng(3), 0
    for rate in (0.6, 0.1, 0.002):
        for _ in range(200):
            step = record(generated(rng, rate, 8, 2), expected=promised(generated(rng, rate, 4, 2)))
            fired += bool(check_step(step, AlarmConfig(tolerance=0), 2, 10))
    assert fired <= 3


def test_a_lost_half_of_the_gain_is_found_in_nearly_every_step() -> None:
    rng = np.random.default_rng(4)
    found = 0
    for _ in range(40):
        expected = promised(generated(rng, 0.55, 16, 4, spread=0.005))
        step = record(generated(rng, 0.33, 16, 4, spread=0.005), expected=expected)
        found += alarms_of(step) == ["acceptance_below_expected"]
    assert found >= 38


def test_speculation_on_without_draft_tokens_is_an_alarm() -> None:
    nothing = [rollout("p0", s, 0, (), paused=63) for s in range(4)]
    [alarm] = check_step(record(nothing), AlarmConfig(), 2, STEPS)
    assert alarm.name == "no_draft_tokens"
    assert "256 tokens" in alarm.what
    assert alarms_of(record(nothing, draft_length=0)) == []
    assert alarms_of(record([rollout("p0", 0, 0, ())])) == [], "a prefill alone drafts nothing"


def test_a_step_without_speculation_is_not_judged_by_acceptance() -> None:
    assert alarms_of(record(dead(), draft_length=0)) == []


def test_lag_over_its_limit_is_an_alarm() -> None:
    assert alarms_of(record(healthy(), lag_versions=3)) == ["drafter_lags"]
    drafter = DrafterConfig(model={"type": "eagle3"}, train_every=2, publish_every=3)
    assert lag_limit(AlarmConfig(), drafter) == 12
    assert lag_limit(AlarmConfig(max_lag_versions=4), drafter) == 4


def test_each_engine_must_serve_what_was_sent() -> None:
    sent = {"fc.weight": "a", "norm.weight": "b"}
    same, lost, absent = dict(sent), sent | {"norm.weight": "c"}, {"fc.weight": "a"}
    assert alarms_of(record(healthy(), deliveries=[Delivery("drafter", sent, [same, same])])) == []
    for other in (lost, absent):
        [alarm] = check_step(
            record(healthy(), deliveries=[Delivery("drafter", sent, [same, other])]), AlarmConfig(), 2, STEPS
        )
        assert alarm.name == "weights_differ"
        assert "engines [1]" in alarm.what
        assert "norm.weight" in alarm.what
        assert not alarm.fatal


def test_a_rollout_of_another_version_is_an_alarm() -> None:
    rollouts = healthy()
    old_drafter = [*rollouts[1:], replace(rollouts[0], versions=Versions(7, 4))]
    old_policy = [*rollouts[1:], replace(rollouts[0], versions=Versions(6, 5))]
    [alarm] = check_step(record(old_drafter), AlarmConfig(), 2, STEPS)
    assert (alarm.name, alarm.fatal) == ("wrong_version", False)
    assert "p7-d4" in alarm.what
    [alarm] = check_step(record(old_policy), AlarmConfig(), 2, STEPS)
    assert alarm.fatal


def test_stop_names_cause_and_remedy_and_the_way_on() -> None:
    alarms = check_step(record(dead(), lag_versions=9), AlarmConfig(), 2, STEPS)
    with pytest.raises(DrafterAlarm) as error:
        respond(12, alarms, "stop")
    text = str(error.value)
    assert text.startswith("step 12 raised drafter_lags, acceptance_collapsed")
    assert text.count("Probable cause: ") == text.count("Remedy: ") == 2
    assert 'on_drafter_failure = "continue"' in text
    assert error.value.alarms == alarms


def test_continue_gives_the_mode_of_every_step_line() -> None:
    alarms = check_step(record(dead()), AlarmConfig(), 2, STEPS)
    assert respond(12, alarms, "continue") == "without speculation since step 12 (acceptance_collapsed)"
    assert respond(12, [], "stop") is None


@pytest.mark.parametrize("policy_fault", [Versions(6, 5), Delivery("policy", {"embed": "a"}, [{"embed": "b"}])])
def test_a_wrong_policy_stops_even_under_continue(policy_fault: object) -> None:
    """Going on without the drafter does not mend rollouts of another policy."""
    step = record(healthy())
    if isinstance(policy_fault, Versions):
        step = replace(step, rollouts=[replace(r, versions=policy_fault) for r in step.rollouts])
    else:
        step = replace(step, deliveries=[policy_fault])
    with pytest.raises(DrafterAlarm) as error:
        respond(3, check_step(step, AlarmConfig(), 2, STEPS), "continue")
    assert "on_drafter_failure" not in str(error.value)


@pytest.mark.parametrize("field", [{"false_alarm_rate": 0}, {"tolerance": 1}, {"max_lag_versions": 0}])
def test_bounds_that_mean_nothing_are_refused(field: dict) -> None:
    with pytest.raises(ValidationError):
        AlarmConfig(**field)
