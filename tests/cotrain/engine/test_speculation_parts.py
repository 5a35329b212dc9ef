"""Step costs, acceptance and measurement, each by itself, and the scheduler that connects them with vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from cotrain.engine.interface import attach
from cotrain.engine.scheduling import DraftLengthScheduler
from cotrain.engine.speculation.draft_length import DraftLengths, Step
from cotrain.engine.speculation.measurement import (
    LIVE_STEPS,
    MEASURE_STEPS,
    Measurement,
    measured_sizes,
    room_for,
)
from cotrain.engine.speculation.served_acceptance import ServedAcceptance
from cotrain.engine.speculation.step_costs import FIRST_DRAFT_SHARE, ratio_at, step_ratios
from cotrain.records import GainReport
from tests.cotrain.engine.simulated_engine import CPU, GOOD, GPU, K, Shape, expected_tokens


@pytest.mark.parametrize("shape", [CPU, GPU], ids=["CPU", "GPU"])
def test_ratios_are_those_of_the_measured_times_and_interpolated(shape: Shape) -> None:
    measured = {(k, b): [shape.seconds(k, k, b)] for k in range(K + 1) for b in (1, 4, 16, 32)}
    ratios = step_ratios(K, 32, measured)
    for batch in (1, 2, 4, 8, 16, 32):
        expected = [shape.seconds(k, k, batch) / shape.seconds(0, 0, batch) for k in range(K + 1)]
        assert ratios[:, batch - 1] == pytest.approx(expected, rel=0.05)


MILLISECONDS = {0: 236.0, 1: 227.0, 2: 194.0, 3: 224.0}
"""Steps of a loaded machine, by draft length: two drafts seem to make a step faster."""


def test_no_draft_makes_a_step_faster_whatever_was_measured() -> None:
    random, lengths = np.random.default_rng(1), [0, 0.01, 0.3, 1, 1.5, 2, 2.9, 3]
    for _ in range(20):
        measured = {
            (k, b): [seconds * np.exp(0.3 * random.normal())] for k, seconds in MILLISECONDS.items() for b in (1, 8)
        }
        ratios = step_ratios(K, 8, measured)
        assert (np.diff(ratios, axis=0) >= -1e-12).all() and ratios[0] == pytest.approx(1.0)
        of_length = [ratio_at(ratios[:, 2].tolist(), length) for length in lengths]
        assert of_length == sorted(of_length)


def test_steps_that_seem_faster_with_more_drafts_cost_what_fewer_drafts_do() -> None:
    ratios = step_ratios(K, 1, {(k, 1): [seconds] for k, seconds in {0: 200.0, 1: 227.0, 2: 194.0, 3: 240.0}.items()})
    assert ratios[:, 0] == pytest.approx([1.0, 1.135, 1.135, 1.2])


def test_the_first_draft_of_a_batch_costs_a_share_of_those_of_all_requests() -> None:
    ratios = [1.0, 1.4, 1.6, 1.8]
    assert ratio_at(ratios, 0) == 1.0 and ratio_at(ratios, 1) == 1.4 and ratio_at(ratios, 2.5) == pytest.approx(1.7)
    assert ratio_at(ratios, 1e-9) == pytest.approx(1 + 0.4 * FIRST_DRAFT_SHARE)
    assert ratio_at(ratios, 0.5) == pytest.approx((ratio_at(ratios, 1e-9) + 1.4) / 2)


def test_a_fast_step_of_no_certain_length_gains_no_more_than_its_tokens() -> None:
    """Right after a change of length, a step is compared with what none without drafts would take."""
    controller, now = DraftLengths(1, 1), 0.0
    controller.begin_measuring()
    for _ in range(2 * MEASURE_STEPS):
        k = controller.choose(now)[1]
        controller.observe(Step(k, 1, False, [(k, 0)] * bool(k), 1))
        now += 0.1
    controller.choose(now)
    controller.end_measuring()
    for k in (1, 0, 1, 0, 1):
        controller.choose(now)
        controller.observe(Step(k, 1, False, [] if k else [(1, 0)], 1))
        now += 0.05
    controller.idle(now)
    gain = GainReport(**controller.report()["gain"])
    assert gain.seconds == pytest.approx(5 * 0.05) and gain.speedup_vs_no_speculation == pytest.approx(1.0)


def test_batch_sizes_without_all_lengths_are_left_out() -> None:
    seconds = {(0, 1): [0.01], (1, 1): [0.02], (0, 4): [0.01], (1, 4): []}
    assert step_ratios(1, 4, seconds)[1] == pytest.approx([2.0] * 4)
    with pytest.raises(ValueError, match="no batch size"):
        step_ratios(2, 4, seconds)


def serve(acceptance: ServedAcceptance, rates: tuple[float, ...], k: int, steps: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(steps):
        acceptance.observe([(k, int(np.cumprod(random.random(k) < np.array(rates[:k])).sum())) for _ in range(4)])


def test_what_is_served_at_one_length_predicts_the_others() -> None:
    acceptance = ServedAcceptance(K)
    serve(acceptance, GOOD, 3, 300)
    assert acceptance.tokens_per_step() == pytest.approx([expected_tokens(GOOD, k) for k in range(K + 1)], rel=0.1)


def test_what_was_served_last_counts_most_and_other_positions_are_not_forgotten() -> None:
    acceptance = ServedAcceptance(K)
    serve(acceptance, (0.9, 0.9, 0.1), 3, 300)
    serve(acceptance, (0.3, 0.9, 0.1), 1, 100)
    lengths = acceptance.tokens_per_step()
    assert lengths[1] == pytest.approx(1.3, abs=0.1)
    assert (lengths[2] - lengths[1]) / (lengths[1] - 1) == pytest.approx(0.9, abs=0.07)


def test_an_expectation_is_where_the_counts_begin() -> None:
    lengths = ServedAcceptance(K, [0.2, 0.05, 0.0]).tokens_per_step()
    assert lengths == pytest.approx([1.0, 1.2, 1.25, 1.25], abs=0.03)
    lengths = ServedAcceptance(K, [0.6]).tokens_per_step()
    assert lengths == pytest.approx([1.0, 1.6, 1.96, 2.176], abs=0.03), "deeper positions are as the one before"
    unknown = ServedAcceptance(K)
    assert unknown.tokens_per_step()[1] == 1.5
    serve(unknown, (0.0, 0.0, 0.0), 3, 10)
    assert unknown.tokens_per_step()[1] < 1.2


def test_measured_lengths_take_turns() -> None:
    measurement, lengths = Measurement("drafter", K, 1, live=False), []
    for _ in range(2 * MEASURE_STEPS * (K + 1)):
        lengths.append(measurement.length)
        measurement.observe(measurement.length, 1, True, 0.1)
    assert lengths == [k for k in (3, 2, 1, 0) * 2 for _ in range(MEASURE_STEPS)]
    assert room_for(1) == 3 * MEASURE_STEPS


def test_only_the_sizes_to_be_measured_count() -> None:
    controller, now = DraftLengths(K, 16), 0.0
    controller.begin_measuring()
    for step in range(4 * MEASURE_STEPS * (K + 1)):
        batch = 4 if step // MEASURE_STEPS // (K + 1) % 2 else 3
        k = controller.choose(now)[batch]
        controller.observe(Step(k, batch, False, [(k, 0)] * batch if k else [], batch))
        now += 0.1
    assert [row[0] for row in controller.end_measuring()] == list(reversed(range(K + 1)))


def test_somebody_elses_batches_are_measured_whatever_their_size() -> None:
    controller, now = DraftLengths(K, 16), 0.0
    controller.begin_measuring(live=True)
    for step in range(100 * MEASURE_STEPS * (K + 1)):
        if controller.has_measured:
            break
        batch = 3 if step % 40 else 5
        k = controller.choose(now)[batch]
        controller.observe(Step(k, batch, False, [(k, 0)] * batch if k else [], batch))
        now += 0.1 * (1 + k)
    assert LIVE_STEPS * (K + 1) <= step < 100
    rows = controller.end_measuring()
    assert [row[:2] for row in rows] == [[k, 3] for k in reversed(range(K + 1))] and not controller.has_measured
    assert controller.choose(now)[3] == 0, "a drafter that is never right is off"


def test_the_largest_batch_is_measured_first() -> None:
    assert measured_sizes(16) == [16, 4, 1] and measured_sizes(1) == [1] and measured_sizes(5) == [5, 4, 1]


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

    def step(tokens: dict[str, list[int]]) -> None:
        output = scheduler.schedule(False)
        sampled = SimpleNamespace(req_id_to_index={r: i for i, r in enumerate(tokens)})
        sampled.sampled_token_ids = list(tokens.values())
        assert scheduler.update_from_output(output, sampled) == "outputs"

    step({"a": [1], "b": [1]})
    step({"a": [1, 2], "b": [1]})
    scheduler.running.pop("b")
    step({"a": [1]})
    scheduler.running.clear()
    step({})
    assert recorder.steps == [
        Step(1, 2, True, [], 2),
        Step(1, 2, False, [(1, 1), (1, 0)], 3),
        Step(2, 1, False, [(1, 0)], 1),
        Step(0, 0, False, [], 0),
    ]
    assert [step.steady for step in recorder.steps[:3]] == [False, True, False]
    report = recorder.report()["steps"]
    assert [row[:5] for row in report] == [[1, 2, "prompts", 1, 2], [1, 2, "steady", 1, 3], [2, 1, "mixed", 1, 1]]
    assert all(row[5] > 0 for row in report)


def test_the_counts_of_a_request_say_which_of_its_drafts_came_from_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own accumulator, which the scheduler's own method fills and which ends with the request."""
    scheduler: Any = object.__new__(DraftLengthScheduler)
    scheduler.draft_lengths = DraftLengths(K, 2)
    counts = {request: RequestSpecDecodeMetrics.new(K) for request in "ab"}
    scheduler.requests = {request: SimpleNamespace(spec_decode_metrics=of) for request, of in counts.items()}

    def update(_: Any, scheduler_output: Any, sampled: Any) -> None:
        for request, draft in scheduler_output.scheduled_spec_decode_tokens.items():
            accepted = len(sampled.sampled_token_ids[sampled.req_id_to_index[request]]) - 1
            counts[request].observe(len(draft), accepted, detailed=True)
        if "b" in sampled.req_id_to_index:
            del scheduler.requests["b"]  # it has ended

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda *_: None)
    monkeypatch.setattr(Scheduler, "has_unfinished_requests", lambda _: True)

    def step(proposer: str, asked: str, verified: dict[str, int]) -> None:
        taken = SimpleNamespace(req_ids=[*asked])
        attach(taken, proposer)
        scheduler.update_draft_token_ids(taken)
        drafts = {request: [5] * number for request, number in verified.items()}
        scheduled = dict.fromkeys(verified, 1)
        output = SimpleNamespace(scheduled_spec_decode_tokens=drafts, num_scheduled_tokens=scheduled)
        output.scheduled_new_reqs, output.num_spec_tokens_to_schedule = [], K
        names = {request: i for i, request in enumerate(verified)}
        scheduler.update_from_output(
            output, SimpleNamespace(req_id_to_index=names, sampled_token_ids=[[1]] * len(names))
        )

    step("history", "ab", {"a": 3})
    step("drafter", "a", {"a": 1, "b": 2})
    step("drafter", "a", {"a": 2})
    assert counts["a"].per_step_drafted == [-3, 1, 2] and counts["b"].per_step_drafted == [-2]
    accepted = ServedAcceptance(K)
    accepted.observe([(2, 0)])
    lengths = scheduler.draft_lengths
    lengths.idle(1.0)
    assert lengths._acceptance.tokens_per_step().tolist() == accepted.tokens_per_step().tolist(), "of the drafter alone"


def test_a_request_drafts_what_is_worth_more_than_its_price() -> None:
    acceptance = ServedAcceptance(3, [0.9, 0.6, 0.1])
    tokens = acceptance.tokens_per_step()
    assert acceptance.best([1.0, 1.2, 1.4, 1.6], 3) == (2, tokens[2])
    assert acceptance.best([1.0, 1.2, 1.4, 1.6], 1) == (1, tokens[1])
    assert acceptance.best([1.0, 2.0, 2.1, 2.3], 3).length == 2, "the first draft token may cost more than it yields"
    assert acceptance.best([1.0, 2.0, 3.0, 4.0], 3) == (0, 1.0)
    assert acceptance.best(None, 3) == (3, tokens[3])
