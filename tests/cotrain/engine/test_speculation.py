"""The choice of draft lengths against a simulated engine: noise on each step, late steps, spells of a slow machine.

Speeds are against no speculation, without the noise: what the choices are worth. benchmarks/draft_length.py has more.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cotrain.config.schema import DrafterConfig
from cotrain.engine.speculation.draft_length import BLOCK_STEPS, PROBE_STEPS, DraftLengths, Plan
from cotrain.publish.alarms import check_step
from cotrain.records import GainReport, Rollout, RolloutBatch, StepTotal, Versions
from tests.cotrain.engine.simulated_engine import (
    BAD,
    COLLAPSED,
    CPU,
    EXCELLENT,
    GOOD,
    GPU,
    LOADED,
    NOISY,
    POOR,
    QUIET,
    K,
    Noise,
    Shape,
    SimulatedEngine,
    Tally,
    best_fixed,
    speed_of_fixed,
)
from tests.publish_evidence import evidence_of

SHAPES = {"two CPU cores": CPU, "GPU": GPU}
DRAFTERS = {"good": GOOD, "bad": BAD}


def engine_of(
    rates: Sequence[float], shape: Shape = CPU, max_batch: int = 32, noise: Noise = NOISY, learnt: bool = True
) -> SimulatedEngine:
    engine = SimulatedEngine(DraftLengths(K, max_batch), shape, rates, noise)
    if learnt:
        engine.learn()
    return engine


def report_of(engine: SimulatedEngine) -> GainReport:
    return GainReport(**engine.rule.report()["gain"])


@pytest.mark.parametrize("rates", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_never_slower_and_on_where_it_pays(shape: Shape, rates: tuple[float, ...]) -> None:
    for batch in (1, 4, 16, 32):
        engine = engine_of(rates, shape)
        tally = engine.run(batch, 600)
        best = best_fixed(shape, rates, batch)
        assert tally.speed > 0.965, engine.rule.describe()
        assert tally.speed > 0.93 * best, engine.rule.describe()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_draining_batch_is_about_as_fast_as_with_the_best_fixed_length_or_faster(shape: Shape) -> None:
    lengths = np.geomspace(25, 400, 16).tolist()

    def speed(engine: SimulatedEngine) -> float:
        tallies = [engine.drain(lengths) for _ in range(3)]
        return sum(t.without for t in tallies) / sum(t.seconds for t in tallies)

    fixed = []
    for k in range(K + 1):
        engine = engine_of(GOOD, shape, max_batch=16, learnt=False)
        engine.rule.fix_num_speculative_tokens(k)
        fixed.append(speed(engine))
    assert fixed[0] == pytest.approx(1.0)
    assert speed(engine_of(GOOD, shape, max_batch=16)) > (1.0 if shape is CPU else 0.97) * max(fixed)


def test_a_drafter_that_collapses_is_switched_off_and_the_next_good_one_is_on_at_once() -> None:
    engine = engine_of(GOOD)
    assert engine.run(1, 200).lengths[-1] > 0
    engine.rates = COLLAPSED
    lengths = np.array(engine.run(1, 600).lengths)
    assert (lengths[:200] == 0).any() and (lengths[250:] > 0).mean() < 0.15
    engine.rates = GOOD
    engine.rule.new_drafter(np.cumprod(GOOD).tolist())
    assert engine.run(1, 100).speed > 1.2


def test_without_an_expectation_a_new_drafter_is_tried_at_once() -> None:
    engine = engine_of(COLLAPSED)
    engine.run(1, 100)
    engine.rates = GOOD
    engine.rule.new_drafter(None)
    lengths = engine.run(1, 150).lengths
    assert any(lengths[:10]) and engine.run(1, 300).speed > 1.2


def test_a_longer_draft_is_chosen_for_what_is_expected_of_a_position_not_drafted_now() -> None:
    """At k = 1 nothing is served at position 2, and what is expected there is not forgotten meanwhile."""
    first_only = (0.6, 0.05, 0.05)
    engine = engine_of(first_only, noise=QUIET)
    lengths = engine.run(1, 300).lengths[-100:]
    assert lengths.count(1) > 85 and set(lengths) > {1}
    engine.rule.new_drafter([0.6, 0.42, 0.3])
    engine.rates = (0.6, 0.7, 0.7)
    assert np.mean(engine.run(1, 40).lengths) > 1.5


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_policy_that_changes_is_followed(shape: Shape, batch: int) -> None:
    """Acceptance goes from bad to good and back, and nobody tells the engine: benchmarks/draft_length.py has the figures."""
    engine = engine_of(COLLAPSED, shape)
    engine.run(batch, 500)
    engine.rates = EXCELLENT
    assert engine.run(batch, 1000).speed > 0.75 * best_fixed(shape, EXCELLENT, batch)
    engine.rates = COLLAPSED
    assert engine.run(batch, 500).speed > 0.92


def test_a_disturbed_start_is_mended() -> None:
    """Steps with two drafts seemed to be the fastest of all, as on a loaded machine; at its real price drafting never pays."""
    engine = SimulatedEngine(DraftLengths(K, 32), CPU, POOR)
    engine.rule.adapt()
    engine.seeming = LOADED
    assert np.mean(engine.run(4, 100).lengths[-20:]) > 1
    engine.seeming = None
    assert engine.run(4, 1000).speed > 0.85
    assert engine.run(4, 300).speed > 0.93


def test_every_length_is_tried_now_and_then_however_bad_it_seems() -> None:
    """For a small share of the time; but not in steps of a fixed length or of another sampling."""
    engine = engine_of(BAD, noise=QUIET)
    engine.run(32, 300)
    tally = engine.run(32, 3000)
    assert all(tally.lengths.count(k) >= BLOCK_STEPS for k in (1, 2, 3))
    assert tally.speed > 0.985
    engine.rule.fix_num_speculative_tokens(2)
    assert set(engine.run(32, 500).lengths) == {2}
    engine.rule.adapt()
    engine.rule.begin(learns=False)
    assert set(engine.run(32, 1000).lengths) == {0}


@pytest.mark.parametrize("rates", DRAFTERS.values(), ids=DRAFTERS)
def test_a_machine_that_slows_down_changes_nothing(rates: tuple[float, ...]) -> None:
    engine = engine_of(rates, noise=Noise(slow_every=float("inf")))
    engine.run(4, 200)
    before = engine.rule.describe().partition(" at batch 5")[0][:4]
    engine.slow_down = 2.0
    tally = engine.run(4, 400)
    assert engine.rule.describe()[:4] == before
    assert tally.speed > 0.95 * best_fixed(CPU, rates, 4)


def mislead(engine: SimulatedEngine, factor: float) -> None:
    """Let it believe that a step with drafts takes so many times what it does."""
    costs = engine.rule._costs
    costs._part(costs._mean)[:] += np.log(factor)
    engine.rule._decide()


# ---------------------------------------------------------------------------------------------------------------
# What is reported
# ---------------------------------------------------------------------------------------------------------------


def test_the_gain_is_reported() -> None:
    engine = engine_of(GOOD)
    engine.rule.begin()
    tally = engine.run(1, 6000)
    report = report_of(engine)
    assert report.speedup_vs_no_speculation == pytest.approx(tally.speed, rel=0.06)
    assert report.seconds == pytest.approx(tally.seconds, rel=0.2) and report.longest_draft in (2, 3)


@pytest.mark.parametrize("noise", [QUIET, NOISY], ids=["quiet", "noisy"])
@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), BAD], ids=["nothing accepted", "bad"])
def test_no_gain_is_above_the_acceptance_length(rates: tuple[float, ...], noise: Noise) -> None:
    """By a table in which steps with drafts take 0.7 times what they do, at any length."""
    engine = engine_of(rates, noise=noise)
    mislead(engine, 0.7)
    for length in (None, None, 1, 3):
        engine.rule.adapt()
        mislead(engine, 0.7)
        if length is not None:
            engine.rule.fix_num_speculative_tokens(length)
        engine.rule.begin()
        tokens, seconds = np.zeros(300), np.zeros(300)
        for i in range(300):
            before = engine.now
            engine.run(4, 1)
            tokens[i], seconds[i] = engine.rule._step.num_tokens / 4, engine.now - before
        engine.rule.idle(engine.now)
        assert report_of(engine).speedup_vs_no_speculation <= np.average(tokens, weights=seconds) + 1e-9
        assert max(engine.rule._gains()[:, 3]) <= max(engine.rule._acceptance.tokens_per_step())


def test_the_report_says_what_the_tokens_would_take_at_each_length() -> None:
    engine = engine_of(GOOD, noise=QUIET)
    engine.rule.begin()
    engine.drain([100.0] * 4 + [400.0])
    found = engine.rule.report()
    report = GainReport(**found["gain"])
    table = np.array(report.seconds_at)
    batches = {batch for _, batch, kind, *_ in found["steps"] if kind != "prompts"}
    assert table.shape == (len(batches), K + 1)
    assert table[:, 0].sum() == pytest.approx(report.seconds_without)
    alone = table[0] / table[0, 0]  # rows are by batch size
    assert alone == pytest.approx([1.0, *CPU.ratios[0]], rel=0.05)


def test_without_speculation_the_speedup_is_one() -> None:
    engine = engine_of((0.0, 0.0, 0.0), noise=QUIET)
    engine.rule._trials._debt = 1e9  # for none in the steps that follow
    engine.run(32, 100)
    engine.rule.begin()
    engine.run(32, 30)
    report = report_of(engine)
    assert report.speedup_vs_no_speculation == pytest.approx(1.0, abs=1e-6) and report.longest_draft == 0
    assert GainReport().speedup_vs_no_speculation == 1.0


def test_drafts_that_no_step_was_left_to_verify_do_not_count() -> None:
    """The first step with drafts only drafts. Where it is the last of a generate call, nothing could be verified: the
    alarm for engines that draft nothing must not see a draft there, and must see one in every other call with drafts."""
    engine = engine_of(BAD, max_batch=16)
    random, drafted, in_vain = np.random.default_rng(0), 0, 0
    for _ in range(600):
        engine.rule.begin()
        tally = engine.drain(random.integers(2, 10, size=16).tolist())
        assert (report_of(engine).longest_draft > 0) == (tally.num_drafts > 0)
        drafted += tally.num_drafts > 0
        in_vain += any(tally.lengths) and not tally.num_drafts
    assert drafted > 10 and in_vain > 0, "calls of both kinds"


def test_every_step_is_added_up_once_by_draft_length_batch_size_and_kind() -> None:
    """Also those of a fixed length, and those that compute prompts."""
    engine = engine_of(GOOD, max_batch=4, noise=QUIET, learnt=False)
    assert engine.rule.report()["steps"] == []
    engine.rule.fix_num_speculative_tokens(0)
    engine.drain([1.0])
    engine.rule.begin()
    engine.run(4, 100)
    engine.rule.fix_num_speculative_tokens(K)
    engine.run(1, 1000)
    engine.drain([1.0, 1.0])
    steps = {step[:3]: step for step in (StepTotal(*row) for row in engine.rule.report()["steps"])}
    assert set(steps) == {(0, 4, "steady"), (K, 1, "mixed"), (K, 1, "steady"), (K, 2, "prompts"), (K, 2, "steady")}
    assert steps[0, 4, "steady"][3:] == (100, 4 * 100, pytest.approx(100 * 0.0226, rel=0.02))
    assert steps[K, 1, "mixed"].num_steps == 1, "the first of another length verifies what the one before drafted"
    assert steps[K, 1, "steady"].num_steps == 999 and steps[K, 2, "prompts"][3:5] == (1, 2)
    _, tokens, seconds = steps[K, 1, "steady"][3:]
    assert tokens / seconds * CPU.without[0] == pytest.approx(speed_of_fixed(CPU, GOOD, 1, K), rel=0.05)


def test_an_engine_without_speculation_adds_its_steps_up_too() -> None:
    engine = SimulatedEngine(DraftLengths(0, 4), CPU, (0.0,) * K, QUIET)
    engine.drain([3.0, 3.0])
    engine.now += 100.0
    engine.drain([2.0])
    steps = [StepTotal(*row) for row in engine.rule.report()["steps"]]
    assert [step[:5] for step in steps] == [
        (0, 2, "prompts", 1, 2), (0, 2, "steady", 3, 6), (0, 1, "prompts", 1, 1), (0, 1, "steady", 2, 2),
    ]  # fmt: skip
    assert sum(step.seconds for step in steps) == pytest.approx(engine.now - 100.0), "nothing of the time between"


def test_reason_in_words() -> None:
    engine = engine_of(GOOD, noise=QUIET)
    words = engine.rule.describe()
    assert re.match(r"k=3 at batch 1( to 2)? \(gain 1\.[34].*\), k=2 at batch [23] to \d", words), words
    assert re.search(r", off at batch \d+ to 32: \d\.\d\dx at k=1$", engine_of(BAD, noise=QUIET).rule.describe())
    engine.rule.fix_num_speculative_tokens(1)
    assert engine.rule.describe() == "k=1 at every batch size (fixed)"


# ---------------------------------------------------------------------------------------------------------------
# Fixed lengths, and steps that teach nothing
# ---------------------------------------------------------------------------------------------------------------


def test_full_length_until_the_engine_may_choose() -> None:
    engine = engine_of(COLLAPSED, learnt=False)
    assert set(engine.run(4, 50).lengths) == {K}
    engine.rule.new_drafter(None)
    assert set(engine.run(4, 50).lengths) == {K}
    engine.rule.adapt()
    lengths = engine.run(4, 400).lengths
    assert set(lengths[:100]) == {0, 1, 2, 3}, "the first steps are spread over the lengths"
    assert lengths[200:].count(0) > 180


def test_nothing_is_learnt_from_another_sampling() -> None:
    """Such as greedy text."""
    engine = engine_of(GOOD)
    before = engine.rule.describe()
    engine.rule.begin(learns=False)
    engine.rates = BAD
    tally = engine.run(1, 500)
    assert len(set(tally.lengths)) == 1, "no probes either"
    assert engine.rule.describe() == before


def test_a_fixed_length_is_kept_and_teaches_what_the_drafter_accepts() -> None:
    engine = engine_of(GOOD)
    engine.rule.fix_num_speculative_tokens(K)
    engine.rates = COLLAPSED
    assert set(engine.run(1, 500).lengths) == {K}, "no probes either"
    engine.rule.adapt()
    assert engine.run(1, 10 * BLOCK_STEPS).lengths.count(0) > 5 * BLOCK_STEPS


def test_the_choice_does_not_wait_for_what_a_draft_will_be() -> None:
    """Losslessness rests on it: of two engines that differ in the next acceptances alone, both draft the same."""

    def lengths(seed: int) -> Any:
        controller = DraftLengths(K, 4)
        engine = SimulatedEngine(controller, CPU, GOOD, QUIET, seed=0)
        engine.learn()
        engine.run(4, 30)
        engine.random = np.random.default_rng(seed)
        return controller.choose(engine.now)

    assert lengths(1) == lengths(2)


def test_drafts_that_only_some_requests_have_teach_what_a_step_costs() -> None:
    """An index drafts for some requests of a batch; a step then costs what it verifies, and the machine slows down."""
    controller = DraftLengths(K, 16)
    engine = SimulatedEngine(controller, CPU, GOOD, QUIET)
    engine.learn(by_request=True)
    engine.looks_up = 0.6
    engine.run(4, 100)
    controller.report()
    engine.slow_down = 2.0
    tally = engine.run(4, 600)
    gain = controller.report()["gain"]
    assert gain["seconds_without"] / gain["seconds"] == pytest.approx(tally.speed, rel=0.05)


def ratios_of(shape: Shape, batch: int, error: float = 0.05) -> Any:
    expected = [shape.seconds(k, k, batch) / shape.seconds(0, 0, batch) for k in range(K + 1)]
    return pytest.approx(expected, rel=error)


def test_each_request_chooses_by_what_a_step_costs_where_history_proposes() -> None:
    controller = DraftLengths(K, 16)
    engine = SimulatedEngine(controller, CPU, GOOD, QUIET)
    assert controller.plan(4) == Plan()
    engine.looks_up = 0.6
    engine.learn(by_request=True, steps=300)
    assert engine.run(1, 60).lengths[-1] == engine.run(16, 60).lengths[-1] == K, "each request may have the most"
    for batch in (1, 16):
        assert controller.plan(batch).ratios == ratios_of(CPU, batch, 0.08)
    controller.fix_num_speculative_tokens(2)
    assert controller.plan(1) == Plan() and set(engine.run(1, 20).lengths) == {2}


def test_where_each_request_chooses_a_step_asks_only_for_what_its_requests_drafted() -> None:
    """Requests may draft nothing for as long as nothing pays, which the alarm for engines that draft nothing must not see."""
    controller = DraftLengths(K, 16)
    engine = SimulatedEngine(controller, CPU, GOOD, QUIET)
    engine.learn(by_request=True)
    controller.idle(engine.now)
    controller.begin()
    engine.looks_up = 0.0
    engine._pending = 0
    engine.run(4, 40)
    report = report_of(engine)
    assert report.longest_draft == 0 and report.seconds > 0
    rollouts = [Rollout("p", 0, [1], [5] * 39, [0.0] * 39, "", "stop", Versions(0, 0))]
    batch = RolloutBatch(rollouts, [], 1.0, 39, gain=report)
    assert check_step(evidence_of(batch, Versions(0, 0)), DrafterConfig(model={"type": "eagle3"}), 100) == []
    engine.looks_up = 0.5
    engine.run(4, 40)
    assert report_of(engine).longest_draft == K


def test_a_batch_pays_for_its_first_draft_whatever_is_drafted() -> None:
    controller = DraftLengths(K, 16)
    engine = SimulatedEngine(controller, CPU, GOOD, QUIET)
    engine.learn(by_request=True)
    engine.looks_up = 0.05
    engine.run(16, 20)
    controller.report()
    tally = engine.run(16, 600)
    gain = controller.report()["gain"]
    assert gain["seconds_without"] / gain["seconds"] == pytest.approx(tally.speed, rel=0.05)


def test_an_index_is_probed_now_and_then() -> None:
    """But not in steps of a fixed length or of another sampling."""
    engine = engine_of(GOOD, noise=QUIET, learnt=False)
    engine.learn(by_request=True)
    controller = engine.rule

    def probes() -> int:
        return sum(engine.step(4, Tally()) is not None and controller.plan(4).probes for _ in range(4 * PROBE_STEPS))

    assert probes() == 4
    controller.begin(learns=False)
    assert probes() == 0
    controller.begin()
    controller.fix_num_speculative_tokens(K)
    assert probes() == 0
