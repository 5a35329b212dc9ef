"""The speculation controller against a simulated engine with 15 % noise on each step, and 2 % of the steps five times
as long. Tokens per second are of the engine without noise: what the choices are worth."""

from pathlib import Path

import numpy as np
import pytest

from cotrain.config.speculation import SpeculationConfig
from cotrain.records import GainReport
from cotrain.rollout.speculation.controller import SpeculationController, speculation_metrics
from cotrain.rollout.speculation.gain_check import combined
from tests.cotrain.rollout.simulated_engine import (
    BAD,
    CPU,
    GOOD,
    GPU,
    WEAK,
    K,
    Shape,
    SimulatedEngine,
    best_fixed,
    rate_of_fixed,
)

SHAPES = {"two CPU cores": CPU, "GPU": GPU}
DRAFTERS = {"good": GOOD, "bad": BAD}


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
@pytest.mark.parametrize("rates", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_never_slower_and_on_where_it_pays(tmp_path: Path, shape: Shape, rates: tuple[float, ...], batch: int) -> None:
    engine = SimulatedEngine(tmp_path, shape, rates)
    engine.calibrate()
    tally = engine.run(batch, 600)
    without, best = rate_of_fixed(shape, rates, batch, 0), best_fixed(shape, rates, batch)
    assert tally.rate > 0.98 * without
    assert tally.rate > 0.95 * best
    assert (np.mean(tally.chosen) > 0.5) == (best > without), engine.controller.describe()
    assert tally.trial_seconds < 0.025 * tally.seconds
    assert np.count_nonzero(np.diff(tally.chosen)) <= 2


def test_a_small_gain_is_taken(tmp_path: Path) -> None:
    """1.10x: the prototype drafter on two CPU cores at batch 1."""
    engine = SimulatedEngine(tmp_path, CPU, WEAK, noise=0.05)
    engine.calibrate()
    tally = engine.run(1, 600)
    assert tally.rate > 0.95 * best_fixed(CPU, WEAK, 1) and tally.rate > 1.03 * rate_of_fixed(CPU, WEAK, 1, 0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_draining_batch_is_faster_than_with_any_fixed_length(tmp_path: Path, shape: Shape) -> None:
    lengths = np.geomspace(25, 400, 16).tolist()

    def speedup(k: int | None) -> float:
        folder = tmp_path / str(k)
        folder.mkdir()
        engine = SimulatedEngine(folder, shape, GOOD, max_batch=16)
        if k is None:
            engine.calibrate()
        else:
            engine.controller.fix_draft_tokens(k)
        tallies = [engine.drain(lengths, update=k is None) for _ in range(3)]
        return sum(t.without for t in tallies) / sum(t.seconds for t in tallies)

    fixed = [speedup(k) for k in range(K + 1)]
    assert fixed[0] == pytest.approx(1.0)
    assert speedup(None) > (1.02 * max(fixed) if shape is CPU else 0.95 * max(fixed))


def test_a_drafter_that_goes_bad_is_switched_off_and_one_that_is_mended_comes_back(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=16)
    engine.calibrate()
    assert engine.run(1, 200).chosen[-1] > 0
    engine.rates = BAD
    bad = engine.run(1, 400)
    assert bad.chosen.index(0) < 80, "2.5 seconds at 31 ms"
    assert not any(bad.chosen[80:])
    engine.rates = GOOD
    engine.controller.new_drafter()
    good = engine.run(1, 400)
    assert np.mean(good.chosen[100:]) > 0, "tried at once, not when 2 % of the time have paid for it"
    assert good.rate > 1.2 * rate_of_fixed(CPU, GOOD, 1, 0)


def test_a_drafter_that_gets_better_by_itself_is_found_by_trials(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, GPU, BAD, max_batch=16)
    engine.calibrate()
    assert engine.run(16, 300).chosen[-1] == 0
    engine.rates = GOOD
    assert engine.run(16, 1500).chosen[-1] > 0


def test_the_promise_of_the_gate_switches_on_at_once(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, BAD, max_batch=16)
    engine.calibrate()
    assert engine.run(1, 200).chosen[-1] == 0
    engine.controller.new_drafter(expected_rates=np.cumprod(GOOD).tolist())
    engine.rates = GOOD
    assert engine.run(1, 40).chosen[0] > 0
    with pytest.raises(ValueError, match="4 expected rates for 3 draft tokens"):
        engine.controller.new_drafter(expected_rates=[0.5, 0.4, 0.3, 0.2])


@pytest.mark.parametrize("rates", [GOOD, BAD], ids=["on", "off"])
def test_a_machine_that_slows_down_changes_nothing(tmp_path: Path, rates: tuple[float, ...]) -> None:
    engine = SimulatedEngine(tmp_path, CPU, rates, max_batch=16)
    engine.calibrate()
    before = engine.run(1, 200).chosen
    engine.slow_down = 2.0
    after = engine.run(1, 400).chosen
    assert np.mean(np.array(after) > 0) == pytest.approx(float(before[-1] > 0), abs=0.05)


@pytest.mark.parametrize("extra", [0.0103, 0.0108])
def test_no_flapping_where_it_hardly_matters(tmp_path: Path, extra: float) -> None:
    """Gains of about 1.0 at batch 1: whatever is chosen, it is not changed all the time, and costs nothing much."""
    shape = Shape((1, 16), (0.0219, 0.0426), (extra * 1.8, 0.1226))
    engine = SimulatedEngine(tmp_path, shape, WEAK, max_batch=16)
    engine.calibrate()
    tally = engine.run(1, 2000)
    switches = np.count_nonzero(np.diff(np.array(tally.chosen) > 0))
    assert switches <= 6 and tally.rate > 0.97 * best_fixed(shape, WEAK, 1)


def test_speedup_is_reported_and_checked(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=16)
    engine.calibrate()
    engine.controller.report()
    tally = engine.run(1, 9000)
    report = engine.controller.report()
    true = tally.without / tally.seconds
    assert report.speedup_vs_no_speculation == pytest.approx(true, rel=0.06)
    assert report.model_gain == pytest.approx(true, rel=0.06)
    assert report.num_checks >= 3 and report.measured_gain == pytest.approx(true, rel=0.08)
    assert abs(report.disagreement) < 0.1 and 0.005 < report.trial_share < 0.025
    assert report.num_steps == pytest.approx(9000, abs=1)
    assert report.seconds == pytest.approx(tally.seconds, rel=0.1) and report.longest_draft in (1, 2, 3)
    assert speculation_metrics(report)["rollout/speedup_vs_no_speculation"] == report.speedup_vs_no_speculation


def test_a_model_that_is_wrong_shows_as_disagreement(tmp_path: Path) -> None:
    """Started on timings by which speculation costs nothing."""
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=16, noise=0.05)
    engine.learn(lambda k, batch: [CPU.seconds(0, 0, batch)])
    engine.run(4, 600)
    report = engine.controller.report()
    assert report.num_checks and report.measured_gain < 0.95
    assert report.disagreement < -0.2


def test_drafts_that_no_step_was_left_to_verify_do_not_count(tmp_path: Path) -> None:
    """The first step of a trial only drafts. Where it is the last of a generate call, nothing could be verified: the
    alarm for engines that draft nothing must not see a draft there, and must see one in every other call with drafts."""
    engine = SimulatedEngine(tmp_path, CPU, BAD, max_batch=4)
    engine.calibrate()
    engine.run(4, 1, update=False)
    engine.planner.idle(engine.now)
    engine.controller.report()
    random, drafted, in_vain = np.random.default_rng(0), 0, 0
    for _ in range(1500):
        tally = engine.drain(random.integers(2, 10, size=4).tolist(), update=False)
        asked = any(step["draft_tokens"] for step in engine.controller._log.waiting())
        report = engine.controller.report()
        assert (report.longest_draft > 0) == (tally.drafts > 0)
        drafted += tally.drafts > 0
        in_vain += asked and not tally.drafts
    assert drafted > 10 and in_vain > 0, "calls of both kinds"


def test_without_speculation_the_speedup_is_one(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, BAD, max_batch=16)
    engine.calibrate()
    engine.run(16, 5)
    engine.controller.report()
    engine.run(16, 300)
    report = engine.controller.report()
    assert (report.speedup_vs_no_speculation, report.model_gain) == (pytest.approx(1.0, abs=0.001), 1.0)
    assert report.measured_gain is None and "rollout/speculation_gain_measured" not in speculation_metrics(report)


def test_reason_in_words(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=16, noise=0.02, outliers=0.0)
    engine.calibrate()
    words = engine.controller.describe()
    assert words.startswith("k=2 at batch 1") and "(gain 1." in words
    assert words.endswith("x at k=1, and no drafter could make it pay") or ", off from batch" in words
    engine.controller.fix_draft_tokens(1)
    assert engine.controller.describe() == "k=1 at every batch size (fixed)"


def test_no_trials_when_their_share_is_zero(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=16, probe_share=0.0)
    engine.calibrate()
    assert engine.run(1, 500).trial_seconds == 0


def test_a_fixed_length_stays(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, BAD, max_batch=16, adaptive=False)
    engine.calibrate()
    tally = engine.run(4, 300)
    assert set(tally.chosen) == {K} and tally.trial_seconds == 0


def test_refuses_what_the_engine_cannot_run(tmp_path: Path) -> None:
    controller = SpeculationController(SpeculationConfig(measure_batch_sizes=(1, 64)), K, 16, tmp_path)
    with pytest.raises(ValueError, match="at most 16 requests at once"):
        controller.timing_plan()
    with pytest.raises(ValueError, match=r"must be 0\.\.3, not 4"):
        controller.fix_draft_tokens(4)
    with pytest.raises(RuntimeError, match="no steady engine step at k=2, batch 4"):
        controller.take_timing(2, 4)


def test_configuration_is_checked() -> None:
    with pytest.raises(ValueError, match="measure_batch_sizes: must be ascending"):
        SpeculationConfig(measure_batch_sizes=(4, 1))
    with pytest.raises(ValueError, match="confidence"):
        SpeculationConfig(confidence=1.0)


def test_full_length_until_it_was_timed(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, BAD, max_batch=16)
    engine.run(4, 100)
    assert not engine.controller.choosing and set(engine.controller.draft_tokens) == {K}
    engine.controller.fix_draft_tokens(None)
    engine.controller.new_drafter()
    assert set(engine.controller.draft_tokens) == {K}
    engine.calibrate()
    assert engine.controller.choosing and engine.controller.draft_tokens[3] == 0


def test_nothing_is_learnt_from_a_fixed_length(tmp_path: Path) -> None:
    """Such as greedy text, or that of a drafter on trial."""
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=16)
    engine.calibrate()
    engine.run(1, 200)
    before = engine.controller.describe()
    engine.controller.fix_draft_tokens(K)
    engine.rates = BAD
    engine.run(1, 500)
    engine.controller.fix_draft_tokens(None)
    assert engine.controller.describe() == before
    engine.run(1, 50, update=False)
    engine.controller.discard_steps()
    engine.controller.update()
    assert engine.controller.describe() == before


def test_reports_of_engines_are_combined_by_time() -> None:
    first = GainReport(1.2, 1.3, 1.25, 0.03, 5, 0.02, 100, 3.0, 2)
    second = GainReport(1.0, 1.0, None, None, 0, 0.0, 40, 1.0, 0)
    both = combined([first, second])
    assert both is not None
    assert both.speedup_vs_no_speculation == pytest.approx(1.15) and both.model_gain == pytest.approx(1.225)
    assert (both.measured_gain, both.measured_error) == (pytest.approx(1.25), pytest.approx(0.03))
    assert (both.num_checks, both.num_steps, both.seconds, both.longest_draft) == (5, 140, 4.0, 2)
    assert combined([first]) == first
    assert combined([]) is None


def test_tokens_and_seconds_are_added_up_by_batch_size(tmp_path: Path) -> None:
    """Of every step that computed no prompt, also of those that nothing is learnt from; each once."""
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=4, noise=0.0, outliers=0.0)
    engine.calibrate()
    engine.controller.fix_draft_tokens(0)
    engine.drain([1.0])
    engine.controller.take_decoded()
    engine.run(4, 100)
    engine.controller.fix_draft_tokens(K)
    engine.run(1, 1000)
    engine.drain([1.0, 1.0])
    decoded = engine.controller.take_decoded()
    assert set(decoded) == {1, 2, 4}
    assert decoded[4] == (4 * 100, pytest.approx(100 * 0.0226, rel=0.02))
    tokens, seconds = decoded[1]
    assert tokens / seconds == pytest.approx(rate_of_fixed(CPU, GOOD, 1, K), rel=0.05)
    assert engine.controller.take_decoded() == {}
