"""The monitor inside a run: what it checks, when, what it finds, and that its false alarms stay within their rate."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from cotrain.config.schema import MonitorConfig
from cotrain.lossless import monitor as monitor_module
from cotrain.lossless.checks import LOGIT_ERROR
from cotrain.lossless.emitted import Draws, response_draws
from cotrain.lossless.family import LEAST_SPECULATED, Verdict, detectable_distance
from cotrain.lossless.monitor import FALSE_ALARM_RATE, Chosen, LosslessMonitor, alpha_share
from cotrain.lossless.setting import PLAIN
from cotrain.records import Rollout, RolloutRequest
from drafters.base import SamplingParams
from tests.cotrain.lossless.markov_engine import MarkovEngine, MarkovModel
from tests.speculation_counts import counts

MODEL = MarkovModel()


def rollouts_of(
    bug: str | None = None, num: int = 64, seed: int = 0, sampling: SamplingParams = PLAIN
) -> list[Rollout]:
    requests = [RolloutRequest(f"p{i}", 0, [3, i % 30], None) for i in range(num)]
    engine = MarkovEngine(bug, seed)
    parameters = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return asyncio.run(engine.generate(requests, tap=False, max_tokens=40, **parameters)).rollouts


def without_speculation(rollouts: list[Rollout]) -> list[Rollout]:
    return [replace(rollout, speculation=None) for rollout in rollouts]


def chosen_by(monitor: LosslessMonitor, rollouts: list[Rollout]) -> Chosen:
    chosen = monitor.choose(rollouts)
    assert chosen is not None
    return chosen


def laws(monitor: LosslessMonitor, rollouts: list[Rollout], sampling: SamplingParams = PLAIN) -> list[Draws]:
    tolerance = monitor.logit_tolerance
    return [response_draws(MODEL, r.prompt_token_ids, r.token_ids, sampling, None, tolerance) for r in rollouts]


def check_of(
    monitor: LosslessMonitor, step: int, rollouts: list[Rollout], seconds: float = 1.0
) -> tuple[Verdict, dict[str, float]]:
    chosen = chosen_by(monitor, rollouts)
    return monitor.check(step, chosen, laws(monitor, chosen.rollouts), seconds)


def monitor_of(**fields: object) -> LosslessMonitor:
    return LosslessMonitor(MonitorConfig.model_validate(fields), PLAIN, "float32", seed=0)


def test_a_clean_run_passes_and_says_how_much_was_seen() -> None:
    verdict, metrics = check_of(monitor_of(), 1, rollouts_of())
    assert verdict.passed and metrics["lossless/passed"] == 1.0
    num_tokens = metrics["lossless/tokens"]
    assert num_tokens > 1500
    # All but the one token of a response that prefill samples.
    assert 0.9 * num_tokens < metrics["lossless/speculated_tokens"] < num_tokens


def test_rollouts_that_were_not_speculated_are_no_pass() -> None:
    monitor, rollouts = monitor_of(), rollouts_of()
    assert monitor.choose(without_speculation(rollouts)) is None
    assert monitor.state()["checks"] == 0 and monitor.due(2, 0.0)
    assert monitor.choose(rollouts[:2] + without_speculation(rollouts[2:])) is None
    verdict, metrics = check_of(monitor, 3, rollouts)
    assert metrics["lossless/check"] == 1 and metrics["lossless/speculated_tokens"] >= LEAST_SPECULATED
    level = verdict.alpha * 6 / len(verdict.results)  # a third step has 1/6 of a first one's rate
    assert detectable_distance(LEAST_SPECULATED, level) == pytest.approx(0.26, abs=0.01)


def test_the_choice_does_not_depend_on_what_was_speculated() -> None:
    """A response that ends at once has no verification step: who takes only those with some sees too few ends."""
    rollouts = rollouts_of(num=64)
    half = rollouts[:32] + without_speculation(rollouts[32:])
    whole, mixed = (chosen_by(monitor_of(tokens=600), batch) for batch in (rollouts, half))
    assert [r.prompt_id for r in whole.rollouts] == [r.prompt_id for r in mixed.rollouts]
    assert mixed.speculated_tokens < whole.speculated_tokens


def test_of_a_response_cut_short_only_what_must_have_been_speculated_counts() -> None:
    """Where its steps without drafts were is not known: they may all lie in the part that is checked."""
    rollout = rollouts_of(num=1)[0]
    tokens = rollout.token_ids * 10
    for emitted, counted in ((399, 249), (250, 100), (249, None), (0, None)):
        counted_steps = counts(emitted, 1, [0]) if emitted else None
        long = replace(rollout, token_ids=tokens, log_probs=rollout.log_probs * 10, speculation=counted_steps)
        chosen = monitor_of(tokens=252).choose([long])
        assert (chosen and chosen.speculated_tokens) == counted
        assert chosen is None or len(chosen.rollouts[0].token_ids) == 250


def test_a_step_that_was_considered_uses_up_its_share_of_the_rate() -> None:
    """How many tokens were speculated depends on the tokens, so a check that does not take place is not free."""
    monitor, rollouts = monitor_of(), rollouts_of()
    for _ in range(2):
        assert monitor.choose(without_speculation(rollouts)) is None
    resumed = monitor_of()
    resumed.load_state(monitor.state())
    assert check_of(resumed, 3, rollouts)[0].alpha == pytest.approx(0.01 / 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_returned_log_prob_is_an_alarm_just_beyond_the_stated_logit_error(dtype: str) -> None:
    """The bound of the false-alarm rate: it holds as long as no logit differs by more."""
    monitor = LosslessMonitor(MonitorConfig(), PLAIN, dtype, seed=0)
    allowed = 2 * LOGIT_ERROR[dtype] * (2 if dtype == "bfloat16" else 1)
    for factor, passes in ((0.99, True), (1.01, False)):
        chosen = chosen_by(monitor, rollouts_of())
        shifted = [replace(r, log_probs=[p + factor * allowed for p in r.log_probs]) for r in chosen.rollouts]
        verdict, _ = monitor.check(1, chosen._replace(rollouts=shifted), laws(monitor, chosen.rollouts), 1.0)
        assert verdict.passed == passes


@pytest.mark.parametrize(
    "bug", ["typical acceptance", "recovered token from q", "draft temperature is not the ratio's"]
)
def test_a_bug_is_caught_in_one_check_and_named(bug: str) -> None:
    verdict, metrics = check_of(monitor_of(tokens=4096), 1, rollouts_of(bug, num=128))
    assert metrics["lossless/passed"] == 0.0
    assert str(verdict).startswith("NOT lossless: ")


def test_log_probs_of_another_distribution_are_caught() -> None:
    wrong = [replace(r, log_probs=[p + 0.01 for p in r.log_probs]) for r in rollouts_of()]
    verdict, _ = check_of(monitor_of(), 1, wrong)
    assert [r.check for r in verdict.failures] == ["returned log-probs"]


def test_weights_of_another_version_are_caught() -> None:
    """Text of a colder policy, which is what an engine that missed an update looks like."""
    verdict, _ = check_of(monitor_of(), 1, rollouts_of(sampling=SamplingParams(0.7, 1.0, 0, "")))
    assert not verdict.passed


def test_false_alarms_of_a_run_stay_below_the_stated_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 runs of 3 checks; with 5 % stated, more than 11 alarms have probability 0.004."""
    monkeypatch.setattr(monitor_module, "FALSE_ALARM_RATE", 0.05)
    alarms = 0
    for run in range(100):
        monitor = LosslessMonitor(MonitorConfig(tokens=512), PLAIN, "float32", seed=run)
        checks = [check_of(monitor, step, rollouts_of(num=16, seed=3 * run + step)) for step in (1, 2, 3)]
        alarms += not all(verdict.passed for verdict, _ in checks)
    assert alarms <= 11


def test_checks_come_first_and_then_every_so_often() -> None:
    monitor = monitor_of(every=10)
    assert monitor.due(1, 0.0)
    check_of(monitor, 1, rollouts_of(num=8), seconds=0.0)
    assert next(step for step in range(2, 32) if monitor.due(step, 100.0)) == 11
    assert not monitor_of(every=0).due(1, 0.0)


def test_checks_wait_until_they_can_be_afforded() -> None:
    monitor = monitor_of(every=1, max_share=0.01)
    check_of(monitor, 1, rollouts_of(num=8), seconds=2.0)
    assert not monitor.due(50, 399.0)
    assert monitor.due(50, 401.0)  # 2 s spent and 2 s to come are 1 % of 400 s
    check_of(monitor, 50, rollouts_of(num=8), seconds=2.0)
    assert not monitor.due(60, 599.0)


def test_the_forward_pass_is_bounded_whatever_the_lengths() -> None:
    rollouts = rollouts_of(num=64)
    chosen = chosen_by(monitor_of(tokens=200), rollouts).rollouts
    assert sum(len(r.prompt_token_ids) + len(r.token_ids) for r in chosen) <= 200
    assert sum(len(r.token_ids) for r in chosen) >= 180
    assert monitor_of(tokens=100).choose(rollouts) is None
    assert all(len(r.log_probs) == len(r.token_ids) for r in chosen)


def test_every_check_takes_other_rollouts_and_a_smaller_share_of_the_rate() -> None:
    monitor, rollouts = monitor_of(tokens=200, every=1), rollouts_of(num=64)
    chosen, checks = [], []
    for step in (1, 2, 3):
        chosen.append(chosen_by(monitor, rollouts))
        checks.append(monitor.check(step, chosen[-1], laws(monitor, chosen[-1].rollouts), 0.0))
    assert len({tuple(r.prompt_id for r in one.rollouts) for one in chosen}) == 3
    assert [verdict.alpha for verdict, _ in checks] == pytest.approx([0.01 / 2, 0.01 / 6, 0.01 / 12])


def test_a_resumed_monitor_goes_on_where_it_was() -> None:
    monitor = monitor_of(every=3)
    check_of(monitor, 5, rollouts_of(num=8), seconds=1.5)
    resumed = monitor_of(every=3)
    resumed.load_state(monitor.state())
    assert resumed.state()["checks"] == 1
    for step, seconds in ((7, 1e6), (8, 299.0), (8, 301.0)):
        assert resumed.due(step, seconds) == monitor.due(step, seconds)
    assert resumed.state() == monitor.state()


def test_greedy_rollouts_are_tested_for_impossible_tokens_alone() -> None:
    greedy = SamplingParams(0.0, 1.0, 0, "")
    monitor = LosslessMonitor(MonitorConfig(), greedy, "float32", seed=0)
    chosen = chosen_by(monitor, rollouts_of(sampling=greedy))
    verdict, _ = monitor.check(1, chosen, laws(monitor, chosen.rollouts, greedy), 1.0)
    assert [r.check for r in verdict.results] == ["support"] and verdict.passed
    swapped = [replace(r, token_ids=[(t + 1) % 30 for t in r.token_ids]) for r in chosen.rollouts]
    verdict, _ = monitor.check(2, chosen._replace(rollouts=swapped), laws(monitor, swapped, greedy), 1.0)
    assert not verdict.passed


def test_wider_number_formats_are_given_more_room() -> None:
    tolerances = [LosslessMonitor(MonitorConfig(), PLAIN, d, 0).logit_tolerance for d in ("float32", "bfloat16")]
    assert tolerances[0] < 0.01 < 0.1 < tolerances[1]
    assert np.isfinite(tolerances).all()


def test_all_shares_of_the_false_alarm_rate_add_up_to_it() -> None:
    """The theorem behind FALSE_ALARM_RATE: a union bound over every step that is ever considered."""
    assert sum(alpha_share(FALSE_ALARM_RATE, n) for n in range(1, 10_000)) == pytest.approx(0.01, rel=1e-3)
    assert alpha_share(0.01, 1) == 0.005
