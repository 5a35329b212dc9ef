"""Step costs, acceptance and trials, each by itself, and the scheduler that connects them with vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from cotrain.engine.scheduling import DraftLengthScheduler
from cotrain.engine.speculation.draft_length import DraftLengths, Step, Trials
from cotrain.engine.speculation.served_acceptance import ServedAcceptance
from cotrain.engine.speculation.step_costs import FIRST_DRAFT_SHARE, StepCosts, ratio_at
from cotrain.records import GainReport
from tests.cotrain.engine.simulated_engine import CPU, GOOD, GPU, K, Shape, expected_tokens

BATCHES = (1, 4, 16, 32)


def learnt(shape: Shape, turns: int = 40, noise: float = 0.0) -> StepCosts:
    """Costs after blocks of four steps of each length at each batch size."""
    costs, random = StepCosts(K, 32), np.random.default_rng(1)
    for k, batch in [(k, batch) for _ in range(turns) for batch in BATCHES for k in range(K + 1)]:
        for _ in range(4):
            costs.observe(k, batch, shape.seconds(k, k, batch) * np.exp(noise * random.normal()))
    return costs


@pytest.mark.parametrize("shape", [CPU, GPU], ids=["CPU", "GPU"])
def test_ratios_are_those_of_the_steps_and_interpolated(shape: Shape) -> None:
    ratios = learnt(shape, noise=0.02).ratios()
    for batch in (1, 2, 4, 8, 16, 32):
        expected = [shape.seconds(k, k, batch) / shape.seconds(0, 0, batch) for k in range(K + 1)]
        assert ratios[:, batch - 1] == pytest.approx(expected, rel=0.06)


def test_a_machine_that_slows_down_leaves_the_costs_as_they_are() -> None:
    """Also while only one length is drafted, whose steps are then the only ones that tell of it."""
    costs = learnt(CPU)
    before = costs.ratios()
    for _ in range(200):
        costs.observe(2, 4, 2 * CPU.seconds(2, 2, 4))
    assert costs.ratios() == pytest.approx(before, rel=0.06)


def test_steps_that_come_late_cost_no_more() -> None:
    costs, random = StepCosts(1, 1), np.random.default_rng(1)
    for step in range(800):
        late = 5.0 if random.random() < 0.03 else 1.0
        costs.observe(step // 4 % 2, 1, late * (0.01 + 0.002 * (step // 4 % 2)) * np.exp(0.05 * random.normal()))
    assert costs.ratios()[1, 0] == pytest.approx(1.2, rel=0.04)


def test_what_is_known_of_one_size_is_expected_of_the_next() -> None:
    costs = StepCosts(K, 16)
    unknown = costs.errors(4)
    assert unknown[0] == 0 and (np.diff(unknown) > 0).all(), "the longer the draft, the less is known"
    for step in range(60):
        costs.observe(step // 4 % (K + 1), 16, 0.01 * (1 + step // 4 % (K + 1)))
    assert (costs.errors(16) < 0.1).all()
    assert (costs.errors(4)[1:] < 0.95 * unknown[1:]).all() and costs.ratios()[3, 3] > 1.8


MILLISECONDS = {0: 236.0, 1: 227.0, 2: 194.0, 3: 224.0}
"""Steps of a loaded machine, by draft length: two drafts seem to make a step faster."""


def test_no_draft_makes_a_step_faster_whatever_was_seen() -> None:
    random, lengths = np.random.default_rng(1), [0, 0.01, 0.3, 1, 1.5, 2, 2.9, 3]
    for _ in range(20):
        costs = StepCosts(K, 8)
        for k, batch in [(k, b) for _ in range(5) for b in (1, 8) for k in (0, 1, 2, 3)]:
            costs.observe(k, batch, MILLISECONDS[k] * np.exp(0.3 * random.normal()))
        ratios = costs.ratios()
        assert (np.diff(ratios, axis=0) >= -1e-12).all() and ratios[0] == pytest.approx(1.0)
        of_length = [ratio_at(ratios[:, 2].tolist(), length) for length in lengths]
        assert of_length == sorted(of_length)


def test_lengths_that_may_be_the_fastest_are_tried_in_turn_and_others_seldom() -> None:
    trials, tokens, sure = Trials(K), np.array([1.0, 1.5, 1.8, 1.9]), np.zeros(K + 1)
    ratios, tried = np.array([1.0, 1.2, 1.6, 3.5]), list[int | None]()
    for _ in range(8):
        trials.begin_block(tokens, ratios, np.array([0.0, 0.15, 0.15, 0.15]))
        tried.append(trials.length)
    assert tried == [2, 1, 0] * 2 + [2, 1], "three drafts are too slow by more than two errors"
    tried.clear()
    for _ in range(4000):
        trials.begin_block(tokens, ratios, sure)
        tried.append(trials.length)
    assert {0, 2, 3} <= set(tried) and 1 not in tried
    lost = sum(ratios[k] / 1.2 * (1 - tokens[k] / ratios[k] / 1.25) for k in tried if k is not None)
    assert lost / len(tried) == pytest.approx(0.01, rel=0.1)


def test_the_first_draft_of_a_batch_costs_a_share_of_those_of_all_requests() -> None:
    ratios = [1.0, 1.4, 1.6, 1.8]
    assert ratio_at(ratios, 0) == 1.0 and ratio_at(ratios, 1) == 1.4 and ratio_at(ratios, 2.5) == pytest.approx(1.7)
    assert ratio_at(ratios, 1e-9) == pytest.approx(1 + 0.4 * FIRST_DRAFT_SHARE)
    assert ratio_at(ratios, 0.5) == pytest.approx((ratio_at(ratios, 1e-9) + 1.4) / 2)


def test_a_fast_step_of_no_certain_length_gains_no_more_than_its_tokens() -> None:
    """Right after a change of length, a step is compared with what none without drafts would take."""
    controller, now = DraftLengths(1, 1), 0.0
    controller.adapt()
    for turn in range(40):
        k = turn // 4 % 2
        controller.choose(now)
        controller.observe(Step(k, 1, False, [(k, 0)] * bool(k), 1))
        now += 0.1
    controller.choose(now)
    controller.begin()
    for k in (1, 0, 1, 0, 1):
        controller.choose(now)
        controller.observe(Step(k, 1, False, [] if k else [(1, 0)], 1))
        now += 0.05
    controller.idle(now)
    gain = GainReport(**controller.report()["gain"])
    assert gain.seconds == pytest.approx(5 * 0.05) and gain.speedup_vs_no_speculation == pytest.approx(1.0, abs=0.02)
    assert gain.speedup_vs_no_speculation <= 1.0


def serve(acceptance: ServedAcceptance, rates: tuple[float, ...], k: int, steps: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(steps):
        acceptance.observe([(k, int(np.cumprod(random.random(k) < np.array(rates[:k])).sum())) for _ in range(4)])
        acceptance.forget_what_is_contradicted()


def test_what_is_served_at_one_length_predicts_the_others() -> None:
    acceptance = ServedAcceptance(K)
    serve(acceptance, GOOD, 3, 300)
    assert acceptance.tokens_per_step() == pytest.approx([expected_tokens(GOOD, k) for k in range(K + 1)], rel=0.1)


def test_drafts_that_follow_from_their_number_are_judged_by_it() -> None:
    """The first draft token of a pair is accepted less often than one alone."""
    acceptance = ServedAcceptance(K, [0.7, 0.5, 0.4], by_length=True)
    serve(acceptance, (0.9,), 1, 100)
    serve(acceptance, (0.3, 0.9), 2, 100)
    assert acceptance.tokens_per_step() == pytest.approx([1, 1.9, 1.57, 2.6], abs=0.1)


def test_what_was_served_last_counts_most_and_other_positions_are_not_forgotten() -> None:
    acceptance = ServedAcceptance(K)
    serve(acceptance, (0.9, 0.9, 0.1), 3, 300)
    serve(acceptance, (0.3, 0.9, 0.1), 1, 100)
    lengths = acceptance.tokens_per_step()
    assert lengths[1] == pytest.approx(1.3, abs=0.1)
    assert (lengths[2] - lengths[1]) / (lengths[1] - 1) == pytest.approx(0.9, abs=0.07)


@pytest.mark.parametrize(("before", "after"), [(GOOD, (0.05, 0.1, 0.1)), ((0.05, 0.1, 0.1), GOOD)])
def test_what_contradicts_all_before_it_counts_alone(before: tuple[float, ...], after: tuple[float, ...]) -> None:
    """A policy that changes is known after some forty drafts, not after hundreds."""
    acceptance = ServedAcceptance(K)
    serve(acceptance, before, 3, 200)
    serve(acceptance, after, 3, 10)  # of four requests
    assert acceptance.tokens_per_step()[1] == pytest.approx(1 + after[0], abs=0.2)


def test_an_expectation_is_where_the_counts_begin() -> None:
    lengths = ServedAcceptance(K, [0.2, 0.05, 0.0]).tokens_per_step()
    assert lengths == pytest.approx([1.0, 1.2, 1.25, 1.25], abs=0.03)
    lengths = ServedAcceptance(K, [0.6]).tokens_per_step()
    assert lengths == pytest.approx([1.0, 1.6, 1.96, 2.176], abs=0.03), "deeper positions are as the one before"
    unknown = ServedAcceptance(K)
    assert unknown.tokens_per_step()[1] == 1.5
    serve(unknown, (0.0, 0.0, 0.0), 3, 10)
    assert unknown.tokens_per_step()[1] < 1.2


class FakeScheduler:
    """vLLM's side: looks the draft length up by the number of scheduled requests, verifies what was drafted before."""

    dynamic_sd_lookup: list[int] | None = None

    def __init__(self) -> None:
        self.running = {"a": 0, "b": 0}
        self.new = ["a", "b"]

    def schedule(self, throttle: bool = False) -> Any:
        assert self.dynamic_sd_lookup is not None
        output = SimpleNamespace(
            num_scheduled_tokens={r: 12 if r in self.new else 1 + n for r, n in self.running.items()},
            scheduled_spec_decode_tokens={request: [5] * n for request, n in self.running.items() if n},
            scheduled_new_reqs=self.new,
            num_spec_tokens_to_schedule=self.dynamic_sd_lookup[len(self.running)],
        )
        self.new = []
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        scheduler_output.scheduled_spec_decode_tokens.clear()
        self.running = dict.fromkeys(self.running, scheduler_output.num_spec_tokens_to_schedule)
        return "outputs"

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)


class Recorder(DraftLengths):
    """Drafts one token for two requests and two for one, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(K, 2)
        self.steps: list[Step] = []

    def choose(self, now: float) -> list[int]:
        super().choose(now)
        return [0, 2, 1]

    def observe(self, step: Step) -> None:
        self.steps.append(step)
        super().observe(step)


def test_scheduler_takes_its_lengths_from_the_controller_and_tells_it_of_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("__init__", "schedule", "update_from_output", "has_unfinished_requests"):
        monkeypatch.setattr(Scheduler, name, getattr(FakeScheduler, name))
    scheduler: Any = object.__new__(DraftLengthScheduler)
    Scheduler.__init__(scheduler)
    scheduler.draft_lengths = recorder = Recorder()
    request = SimpleNamespace(is_finished=lambda: False, drop_stale_output=True, num_stale_output_tokens=0)
    scheduler.requests = {"a": request, "b": request}

    def step(tokens: dict[str, list[int]]) -> None:
        output = scheduler.schedule(False)
        sampled = SimpleNamespace(req_id_to_index={r: i for i, r in enumerate(tokens)})
        sampled.sampled_token_ids = list(tokens.values())
        assert scheduler.update_from_output(output, sampled) == "outputs"

    step({"a": [1], "b": [1]})
    step({"a": [1, 2], "b": [1]})
    del scheduler.requests["b"]  # the step before has ended it, which is known while this one runs
    step({"a": [1], "b": [1, 2]})
    scheduler.running.pop("b")
    step({"a": [1]})
    scheduler.running.clear()
    step({})
    assert recorder.steps == [
        Step(1, 2, True, [], 2),
        Step(1, 2, False, [(1, 1), (1, 0)], 3),
        Step(1, 1, False, [(1, 0)], 1),
        Step(2, 1, False, [(1, 0)], 1),
    ]
    assert [step.kind for step in recorder.steps] == ["prompts", "steady", "steady", "mixed"]
    report = recorder.report()["steps"]
    known = [[1, 2, "prompts", 1, 2], [1, 2, "steady", 1, 3], [1, 1, "steady", 1, 1], [2, 1, "mixed", 1, 1]]
    assert [row[:5] for row in report] == known
    assert all(row[5] > 0 for row in report)


def test_a_request_drafts_what_is_worth_more_than_its_price() -> None:
    acceptance = ServedAcceptance(3, [0.9, 0.6, 0.1])
    tokens = acceptance.tokens_per_step()
    assert acceptance.best([1.0, 1.2, 1.4, 1.6], 3) == (2, tokens[2])
    assert acceptance.best([1.0, 1.2, 1.4, 1.6], 1) == (1, tokens[1])
    assert acceptance.best([1.0, 2.0, 2.1, 2.3], 3).length == 2, "the first draft token may cost more than it yields"
    assert acceptance.best([1.0, 2.0, 3.0, 4.0], 3) == (0, 1.0)
    assert acceptance.best(None, 3) == (3, tokens[3])
