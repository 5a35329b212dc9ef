"""The monitor inside a run: what it checks, when, what it finds, and that its false alarms stay within their rate."""

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from cotrain.config.schema import MonitorConfig
from cotrain.lossless import monitor as monitor_module
from cotrain.lossless.checks import LOGIT_ERROR
from cotrain.lossless.emitted import Draws, response_draws
from cotrain.lossless.family import LEAST_SPECULATED, Verdict, detectable_distance
from cotrain.lossless.monitor import FALSE_ALARM_RATE, LosslessMonitor, alpha_share
from cotrain.lossless.setting import PLAIN
from cotrain.records import Rollout, RolloutRequest
from drafters.base import SamplingParams
from tests.cotrain.lossless.markov_engine import MarkovEngine, MarkovModel
from tests.speculation_counts import steps_of

MODEL = MarkovModel()


def rollouts_of(
    bug: str | None = None, num: int = 64, seed: int = 0, sampling: SamplingParams = PLAIN
) -> list[Rollout]:
    requests = [RolloutRequest(f"p{i}", 0, [3, i % 30], None) for i in range(num)]
    engine = MarkovEngine(bug, seed)
    parameters = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return asyncio.run(engine.generate(requests, tap=False, max_tokens=40, **parameters)).rollouts


def without_speculation(rollouts: list[Rollout]) -> list[Rollout]:
    return [replace(rollout, verification_steps=()) for rollout in rollouts]


@dataclass
class Forward:
    """The learner's forward pass. It holds what was chosen, and each pass takes so many seconds of the monitor's clock."""

    tolerance: float
    sampling: SamplingParams = PLAIN
    chosen: list[Rollout] = field(default_factory=list)

    def __call__(self, rollouts: list[Rollout]) -> list[Draws]:
        self.chosen = rollouts
        CLOCK.now += CLOCK.seconds
        arguments = self.sampling, None, self.tolerance
        return [response_draws(MODEL, r.prompt_token_ids, r.token_ids, *arguments) for r in rollouts]


class Clock:
    """Stands still but in forward passes."""

    now, seconds = 0.0, 1.0


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    CLOCK.seconds = 1.0
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    return CLOCK


def tried(
    monitor: LosslessMonitor, step: int, rollouts: list[Rollout], run_seconds: float = 1e6
) -> tuple[Verdict, dict[str, float]] | None:
    return monitor.check(step, rollouts, run_seconds, Forward(monitor.logit_tolerance))


def check_of(
    monitor: LosslessMonitor, step: int, rollouts: list[Rollout], run_seconds: float = 1e6
) -> tuple[Verdict, dict[str, float]]:
    checked = tried(monitor, step, rollouts, run_seconds)
    assert checked is not None
    return checked


def chosen_by(monitor: LosslessMonitor, rollouts: list[Rollout], step: int = 1) -> tuple[list[Rollout], float]:
    """The rollouts that are checked, and how many of their tokens were speculated."""
    forward = Forward(monitor.logit_tolerance)
    checked = monitor.check(step, rollouts, 1e6, forward)
    assert checked is not None
    return forward.chosen, checked[1]["lossless/speculated_tokens"]


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
    assert tried(monitor, 1, without_speculation(rollouts)) is None
    assert monitor.state()["checks"] == 0
    assert tried(monitor, 2, rollouts[:2] + without_speculation(rollouts[2:]), run_seconds=0.0) is None
    assert monitor.state()["considered"] == 2, "a check that did not take place is due again"
    verdict, metrics = check_of(monitor, 3, rollouts)
    assert metrics["lossless/check"] == 1 and metrics["lossless/speculated_tokens"] >= LEAST_SPECULATED
    level = verdict.alpha * 6 / len(verdict.results)  # a third step has 1/6 of a first one's rate
    assert detectable_distance(LEAST_SPECULATED, level) == pytest.approx(0.26, abs=0.01)


def test_the_choice_does_not_depend_on_what_was_speculated() -> None:
    """A response that ends at once has no verification step: who takes only those with some sees too few ends."""
    rollouts = rollouts_of(num=64)
    half = rollouts[:32] + without_speculation(rollouts[32:])
    whole, mixed = (chosen_by(monitor_of(tokens=600), batch) for batch in (rollouts, half))
    assert [r.prompt_id for r in whole[0]] == [r.prompt_id for r in mixed[0]]
    assert mixed[1] < whole[1]


def test_of_a_response_cut_short_only_what_must_have_been_speculated_counts() -> None:
    """Where its steps without drafts were is not known: they may all lie in the part that is checked."""
    rollout = rollouts_of(num=1)[0]
    tokens = rollout.token_ids * 10
    for emitted, counted in ((399, 249), (250, 100), (249, None), (0, None)):
        steps = steps_of(emitted, 1, [0])
        long = replace(rollout, token_ids=tokens, log_probs=rollout.log_probs * 10, verification_steps=steps)
        checked = tried(monitor_of(tokens=252), 1, [long])
        assert (checked and checked[1]["lossless/speculated_tokens"]) == counted
        assert checked is None or checked[1]["lossless/tokens"] == 250


def test_a_step_that_was_considered_uses_up_its_share_of_the_rate() -> None:
    """How many tokens were speculated depends on the tokens, so a check that does not take place is not free."""
    monitor, rollouts = monitor_of(), rollouts_of()
    for step in (1, 2):
        assert tried(monitor, step, without_speculation(rollouts)) is None
    resumed = LosslessMonitor(MonitorConfig(), PLAIN, "float32", 0, saved=monitor.state())
    assert check_of(resumed, 3, rollouts)[0].alpha == pytest.approx(0.01 / 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_returned_log_prob_is_an_alarm_just_beyond_the_stated_logit_error(dtype: str) -> None:
    """The bound of the false-alarm rate: it holds as long as no logit differs by more."""
    allowed = 2 * LOGIT_ERROR[dtype] * (2 if dtype == "bfloat16" else 1)
    for factor, passes in ((0.99, True), (1.01, False)):
        shifted = [replace(r, log_probs=[p + factor * allowed for p in r.log_probs]) for r in rollouts_of()]
        assert check_of(LosslessMonitor(MonitorConfig(), PLAIN, dtype, seed=0), 1, shifted)[0].passed == passes


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
        monitor = LosslessMonitor(MonitorConfig(tokens=512, every=1), PLAIN, "float32", seed=run)
        checks = [check_of(monitor, step, rollouts_of(num=16, seed=3 * run + step)) for step in (1, 2, 3)]
        alarms += not all(verdict.passed for verdict, _ in checks)
    assert alarms <= 11


def test_checks_come_first_and_then_every_so_often() -> None:
    CLOCK.seconds, monitor, rollouts = 0.0, monitor_of(every=10), rollouts_of(num=8)
    check_of(monitor, 1, rollouts, run_seconds=0.0)
    assert next(step for step in range(2, 32) if tried(monitor, step, rollouts, 100.0)) == 11
    assert tried(monitor_of(every=0), 1, rollouts, 0.0) is None
    assert tried(monitor_of(), 1, []) is None


def test_checks_wait_until_they_can_be_afforded() -> None:
    CLOCK.seconds, monitor, rollouts = 2.0, monitor_of(every=1, max_share=0.01), rollouts_of(num=8)
    check_of(monitor, 1, rollouts)
    assert tried(monitor, 50, rollouts, run_seconds=399.0) is None
    check_of(monitor, 50, rollouts, run_seconds=401.0)  # 2 s spent and 2 s to come are 1 % of 400 s
    assert tried(monitor, 60, rollouts, run_seconds=599.0) is None


def test_the_forward_pass_is_bounded_whatever_the_lengths() -> None:
    rollouts = rollouts_of(num=64)
    chosen, _ = chosen_by(monitor_of(tokens=200), rollouts)
    assert sum(len(r.prompt_token_ids) + len(r.token_ids) for r in chosen) <= 200
    assert sum(len(r.token_ids) for r in chosen) >= 180
    assert tried(monitor_of(tokens=100), 1, rollouts) is None
    assert all(len(r.log_probs) == len(r.token_ids) for r in chosen)


def test_every_check_takes_other_rollouts_and_a_smaller_share_of_the_rate() -> None:
    monitor, rollouts, alphas, chosen = monitor_of(tokens=200, every=1), rollouts_of(num=64), [], set()
    for step in (1, 2, 3):
        forward = Forward(monitor.logit_tolerance)
        checked = monitor.check(step, rollouts, 1e6, forward)
        assert checked is not None
        alphas.append(checked[0].alpha)
        chosen.add(tuple(r.prompt_id for r in forward.chosen))
    assert len(chosen) == 3 and alphas == pytest.approx([0.01 / 2, 0.01 / 6, 0.01 / 12])


def test_a_resumed_monitor_goes_on_where_it_was() -> None:
    CLOCK.seconds, monitor, rollouts = 1.5, monitor_of(every=3), rollouts_of(num=8)
    check_of(monitor, 5, rollouts)
    resumed = LosslessMonitor(MonitorConfig(every=3), PLAIN, "float32", 0, saved=monitor.state())
    assert resumed.state()["checks"] == 1
    for step, seconds, is_due in ((7, 1e6, False), (8, 599.0, False), (8, 601.0, True)):
        one, other = (tried(each, step, rollouts, seconds) for each in (monitor, resumed))
        assert (one is not None) == (other is not None) == is_due
    assert resumed.state() == monitor.state()


def test_greedy_rollouts_are_tested_for_impossible_tokens_alone() -> None:
    greedy = SamplingParams(0.0, 1.0, 0, "")
    monitor = LosslessMonitor(MonitorConfig(), greedy, "float32", seed=0)
    rollouts, forward = rollouts_of(sampling=greedy), Forward(monitor.logit_tolerance, greedy)
    checked = monitor.check(1, rollouts, 1e6, forward)
    assert checked and checked[0].passed and [r.check for r in checked[0].results] == ["support"]
    swapped = [replace(r, token_ids=[(t + 1) % 30 for t in r.token_ids]) for r in rollouts]
    checked = monitor.check(11, swapped, 1e6, forward)
    assert checked and not checked[0].passed


def test_wider_number_formats_are_given_more_room() -> None:
    tolerances = [LosslessMonitor(MonitorConfig(), PLAIN, d, 0).logit_tolerance for d in ("float32", "bfloat16")]
    assert tolerances[0] < 0.01 < 0.1 < tolerances[1]
    assert np.isfinite(tolerances).all()


def test_all_shares_of_the_false_alarm_rate_add_up_to_it() -> None:
    """The theorem behind FALSE_ALARM_RATE: a union bound over every step that is ever considered."""
    assert sum(alpha_share(FALSE_ALARM_RATE, n) for n in range(1, 10_000)) == pytest.approx(0.01, rel=1e-3)
    assert alpha_share(0.01, 1) == 0.005
