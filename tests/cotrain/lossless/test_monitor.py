"""The monitor inside a run: what it looks at, when, what it finds, and that its false alarms stay within their rate."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from cotrain.lossless.draws import Draws
from cotrain.lossless.emitted import response_draws
from cotrain.lossless.monitor import Look, LosslessMonitor
from cotrain.lossless.monitor_config import MonitorConfig
from cotrain.lossless.setting import PLAIN
from cotrain.records import Rollout, RolloutRequest
from drafters.base import Sampler
from tests.cotrain.lossless.markov_engine import MarkovEngine, MarkovModel

MODEL = MarkovModel()


def rollouts_of(bug: str | None = None, num: int = 64, seed: int = 0, sampler: Sampler = PLAIN) -> list[Rollout]:
    requests = [RolloutRequest(f"p{i}", 0, [3, i % 30], None) for i in range(num)]
    engine = MarkovEngine(bug, seed)
    parameters = {"temperature": sampler.temperature, "top_p": sampler.top_p, "top_k": sampler.top_k}
    return asyncio.run(engine.generate(requests, tap=False, max_tokens=40, **parameters)).rollouts


def laws(monitor: LosslessMonitor, chosen: list[Rollout], sampler: Sampler = PLAIN) -> list[Draws]:
    tolerance = monitor.logit_tolerance
    return [response_draws(MODEL, r.prompt_token_ids, r.token_ids, sampler, None, tolerance) for r in chosen]


def look_at(monitor: LosslessMonitor, step: int, rollouts: list[Rollout], seconds: float = 1.0) -> Look:
    chosen = monitor.choose(rollouts)
    return monitor.look(step, chosen, laws(monitor, chosen), seconds)


def monitor_of(**fields: object) -> LosslessMonitor:
    return LosslessMonitor(MonitorConfig.model_validate(fields), PLAIN, "float32", seed=0)


def test_a_clean_run_passes_and_says_how_much_was_seen() -> None:
    look = look_at(monitor_of(), 1, rollouts_of())
    assert look.passed
    assert look.metrics()["lossless/passed"] == 1.0
    assert look.metrics()["lossless/tokens"] == look.num_tokens > 1500
    assert f"{look.num_tokens} tokens, look 1" in look.message()


@pytest.mark.parametrize(
    "bug", ["typical acceptance", "recovered token from q", "draft temperature is not the ratio's"]
)
def test_a_bug_is_caught_in_one_look_and_named(bug: str) -> None:
    look = look_at(monitor_of(tokens=4096), 1, rollouts_of(bug, num=128))
    assert not look.passed
    assert look.message().startswith("rollouts do not have the policy's distribution: look 1, NOT lossless: ")


def test_log_probs_of_another_distribution_are_caught() -> None:
    wrong = [replace(r, log_probs=[p + 0.01 for p in r.log_probs]) for r in rollouts_of()]
    look = look_at(monitor_of(), 1, wrong)
    assert [row.result.check for row in look.verdict.failures] == ["returned log-probs"]


def test_weights_of_another_version_are_caught() -> None:
    """Text of a colder policy, which is what an engine that missed an update looks like."""
    look = look_at(monitor_of(), 1, rollouts_of(sampler=Sampler(0.7, 1.0, 0, "")))
    assert not look.passed


def test_false_alarms_of_a_run_stay_below_the_stated_rate() -> None:
    """100 runs of 3 looks; with 5 % stated, more than 11 alarms have probability 0.004."""
    alarms = 0
    for run in range(100):
        monitor = LosslessMonitor(MonitorConfig(tokens=512, false_alarm_rate=0.05), PLAIN, "float32", seed=run)
        looks = [look_at(monitor, step, rollouts_of(num=16, seed=3 * run + step)) for step in (1, 2, 3)]
        alarms += not all(look.passed for look in looks)
    assert alarms <= 11


def test_looks_come_first_and_then_every_so_often() -> None:
    monitor = monitor_of(every=10)
    assert monitor.due(1, 0.0)
    look_at(monitor, 1, rollouts_of(num=4), seconds=0.0)
    assert next(step for step in range(2, 32) if monitor.due(step, 100.0)) == 11
    assert not monitor_of(enabled=False).due(1, 0.0)


def test_looks_wait_until_they_can_be_afforded() -> None:
    monitor = monitor_of(every=1, max_share=0.01)
    look_at(monitor, 1, rollouts_of(num=4), seconds=2.0)
    assert not monitor.due(50, 399.0)
    assert monitor.due(50, 401.0)  # 2 s spent and 2 s to come are 1 % of 400 s
    look_at(monitor, 50, rollouts_of(num=4), seconds=2.0)
    assert not monitor.due(60, 599.0)


def test_the_forward_pass_is_bounded_whatever_the_lengths() -> None:
    rollouts = rollouts_of(num=64)
    chosen = monitor_of(tokens=100).choose(rollouts)
    assert sum(len(r.prompt_token_ids) + len(r.token_ids) for r in chosen) <= 100
    assert sum(len(r.token_ids) for r in chosen) >= 90
    longer = [replace(r, prompt_token_ids=[1] * 500) for r in rollouts]
    assert [len(r.token_ids) for r in monitor_of(tokens=100).choose(longer)] == [1]
    assert all(len(r.log_probs) == len(r.token_ids) for r in chosen)


def test_every_look_takes_other_rollouts_and_a_smaller_share_of_the_rate() -> None:
    monitor, rollouts = monitor_of(tokens=200, every=1), rollouts_of(num=64)
    first = monitor.choose(rollouts)
    looks = [look_at(monitor, step, rollouts, seconds=0.0) for step in (1, 2, 3)]
    assert [r.prompt_id for r in monitor.choose(rollouts)] != [r.prompt_id for r in first]
    assert [look.verdict.alpha for look in looks] == pytest.approx([0.01 / 2, 0.01 / 6, 0.01 / 12])


def test_a_resumed_monitor_goes_on_where_it_was() -> None:
    monitor = monitor_of(every=3)
    look_at(monitor, 5, rollouts_of(num=4), seconds=1.5)
    resumed = monitor_of(every=3)
    resumed.load_state(monitor.state())
    assert resumed.num_looks == 1
    for step, seconds in ((7, 1e6), (8, 299.0), (8, 301.0)):
        assert resumed.due(step, seconds) == monitor.due(step, seconds)
    assert resumed.state() == monitor.state()


def test_greedy_rollouts_are_tested_for_impossible_tokens_alone() -> None:
    greedy = Sampler(0.0, 1.0, 0, "")
    monitor = LosslessMonitor(MonitorConfig(), greedy, "float32", seed=0)
    chosen = monitor.choose(rollouts_of(sampler=greedy))
    look = monitor.look(1, chosen, laws(monitor, chosen, greedy), 1.0)
    assert [row.result.check for row in look.verdict.rows] == ["support"] and look.passed
    swapped = [replace(r, token_ids=[(t + 1) % 30 for t in r.token_ids]) for r in chosen]
    assert not monitor.look(2, swapped, laws(monitor, swapped, greedy), 1.0).passed


def test_wider_number_formats_are_given_more_room() -> None:
    tolerances = [LosslessMonitor(MonitorConfig(), PLAIN, d, 0).logit_tolerance for d in ("float32", "bfloat16")]
    assert tolerances[0] < 0.01 < 0.1 < tolerances[1]
    assert np.isfinite(tolerances).all()
