"""Timing of engine steps at the start, on the simulated engine: each poll is one engine step."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from cotrain.rollout.speculation import step_timing
from cotrain.rollout.speculation.step_timing import room_for, time_steps
from tests.cotrain.rollout.simulated_engine import BAD, CPU, GOOD, K, SimulatedEngine, Tally

MAX_BATCH = 16


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "POLL_SECONDS", 0.0)


class SimulatedDecoding:
    """Requests of `room` tokens on a simulated engine, which makes a step whenever it is looked at."""

    def __init__(self, engine: SimulatedEngine, room: int):
        self.engine, self.room = engine, room
        self.left = np.zeros(0)
        self.batches: list[int] = []
        self.tally = Tally()

    async def begin(self, batch: int) -> None:
        assert not len(self.left), "the batch before was not ended"
        self.batches.append(batch)
        self.left = np.full(batch, float(self.room))
        self.engine.step(batch, self.tally, update=False, prefill=True)

    def ended(self) -> bool:
        if len(self.left) and (self.left > 0).all():
            self.left = self.left - self.engine.step(len(self.left), self.tally, update=False)
        return bool((self.left <= 0).any())

    async def end(self) -> None:
        self.left = np.zeros(0)
        self.engine.planner.idle(self.engine.now)
        self.engine._pending = 0


def timed(engine: SimulatedEngine, room: int = room_for(K)) -> tuple[int, SimulatedDecoding]:
    decoding = SimulatedDecoding(engine, room)
    return asyncio.run(time_steps(engine.controller, decoding, room)), decoding


@pytest.mark.parametrize("rates", [GOOD, BAD], ids=["good", "bad"])
def test_rounds_until_nothing_is_left_in_doubt(tmp_path: Path, rates: tuple[float, ...]) -> None:
    engine = SimulatedEngine(tmp_path, CPU, rates, max_batch=MAX_BATCH)
    num_timings, decoding = timed(engine)
    once = (K + 1) * 3
    assert 2 * once <= num_timings <= 6 * once
    assert decoding.batches[:6] == [1, 4, 16] * 2, "one batch of requests for all draft lengths"
    assert engine.controller.choosing
    assert (engine.controller.draft_tokens[0] > 0) == (rates is GOOD)
    assert engine.controller.draft_tokens[-1] == 0


def test_time_is_bounded(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=MAX_BATCH, measure_seconds=1e-9)
    num_timings, decoding = timed(engine)
    assert (num_timings, decoding.batches) == (0, [])
    assert not engine.controller.choosing
    assert engine.controller.describe() == f"k={K} at every batch size (fixed)"


def test_what_was_timed_before_the_time_was_up_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=MAX_BATCH, measure_seconds=0.5)
    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: engine.now)
    num_timings, decoding = timed(engine)
    assert num_timings == (K + 1) * len(decoding.batches) < 2 * 3 * (K + 1)
    assert engine.controller.choosing


@pytest.mark.parametrize("room", [12, 40])
def test_short_requests_begin_again_for_each_length(tmp_path: Path, room: int) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=4, noise=0.02)
    num_timings, decoding = timed(engine, room)
    assert num_timings >= 2 * 2 * (K + 1) - 2
    assert len(decoding.batches) > 2 * 2
    assert engine.controller.draft_tokens[0] > 0


def test_requests_too_short_for_any_step_leave_the_length_fixed(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=1)
    assert timed(engine, room=1)[0] == 0
    assert not engine.controller.choosing


def test_one_batch_size_is_repeated_like_several(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=1)
    num_timings, decoding = timed(engine)
    assert num_timings >= 3 * (K + 1) and decoding.batches[:3] == [1, 1, 1]


def test_an_error_of_a_request_is_raised_and_the_length_is_given_back(tmp_path: Path) -> None:
    engine = SimulatedEngine(tmp_path, CPU, GOOD, max_batch=1)
    decoding = SimulatedDecoding(engine, room_for(K))

    async def fail() -> None:
        raise RuntimeError("engine died")

    decoding.end = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(time_steps(engine.controller, decoding, room_for(K)))
    assert engine.controller.describe() == f"k={K} at every batch size (fixed)"
