"""Times engine steps on purpose, for what the speculation controller starts from.

One batch of requests decodes while the draft length goes from one to the next, so that its prompts are computed once.
As many steps are timed as a quantile needs, and after `measure_seconds` no further batch is begun. SmolLM2 on two CPU
cores takes about 13 s for 4 draft lengths at batch sizes 1, 4, 16 and 32, prompts included. Two such passes, and as
many timings again where it is in doubt, fit into the default of 60 s; after 20 s a gain of 8 % went unnoticed.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

from cotrain.rollout.speculation.controller import SpeculationController

MOST_STEPS = 8
"""Steady steps of one timing."""

LEAST_STEPS, LEAST_SECONDS = 3, 0.4
"""Or so many, once they have taken so long: slow steps are large ones, and vary less."""

CHANGE_STEPS = 2
"""Steps that a change of the draft length spends, beside those timed: the first verifies what the old one drafted."""

PREFILL_STEPS = 4
"""Steps in which a part of the batch may decode while the prompts of the rest are computed."""

POLL_SECONDS = 0.005


class Decoding(Protocol):
    """Requests that an engine decodes for the sake of the time it takes."""

    async def begin(self, batch: int) -> None:
        """Start a batch of requests of `room` tokens each."""
        ...

    def ended(self) -> bool:
        """Has a request of the batch finished?"""
        ...

    async def end(self) -> None:
        """Stop what is left of the batch, if there is one. Raises what a request raised."""
        ...


def room_for(max_draft_tokens: int) -> int:
    """Tokens of a request that suffice to time all draft lengths, if every draft token were accepted."""
    return sum(_tokens(k) for k in range(max_draft_tokens + 1)) + PREFILL_STEPS * (max_draft_tokens + 1)


async def time_steps(controller: SpeculationController, decoding: Decoding, room: int) -> int:
    """Timing rounds until the plan is empty or the time is up, and then the choice is the controller's.

    room: tokens of a request; draft lengths for which it is too small begin a batch of their own. Returns the number
    of timings; with none, since requests of few tokens end too soon, the draft length stays fixed. Raises ValueError
    for batch sizes that the engine cannot run.
    """
    deadline = time.perf_counter() + controller.config.measure_seconds
    num_timings = num_rounds = 0
    controller.begin_timing()
    try:
        while True:
            timings: list[tuple[int, int, Sequence[float]]] = []
            for batch, lengths in _batches(controller.timing_plan(num_rounds)):
                if time.perf_counter() > deadline:
                    break
                timings += await _time_batch(controller, decoding, batch, lengths, room)
            if not timings:
                return num_timings
            num_timings, num_rounds = num_timings + len(timings), num_rounds + 1
            controller.learn_timings(timings)
    finally:
        controller.fix_draft_tokens(None)


def _batches(plan: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """(batch size, draft lengths) that follow each other in the plan, each length once."""
    batches: list[tuple[int, list[int]]] = []
    for k, batch in plan:
        if not batches or batches[-1][0] != batch or k in batches[-1][1]:
            batches.append((batch, []))
        batches[-1][1].append(k)
    return batches


async def _time_batch(
    controller: SpeculationController, decoding: Decoding, batch: int, lengths: Sequence[int], room: int
) -> list[tuple[int, int, Sequence[float]]]:
    timings: list[tuple[int, int, Sequence[float]]] = []
    left = 0
    try:
        for k in sorted(lengths, reverse=True):  # so that each finds the drafter's cache complete
            controller.fix_draft_tokens(k)
            if left < _tokens(k) or decoding.ended():
                await decoding.end()
                await decoding.begin(batch)
                left = room - PREFILL_STEPS * (k + 1)
            left -= _tokens(k)
            if await _timed_steps(controller, decoding, k, batch):
                timings.append((k, batch, controller.take_timing(k, batch)))
    finally:
        await decoding.end()
    return timings


def _tokens(k: int) -> int:
    """Most tokens that a request gets while one length is timed."""
    return (MOST_STEPS + CHANGE_STEPS) * (k + 1)


async def _timed_steps(controller: SpeculationController, decoding: Decoding, k: int, batch: int) -> int:
    """Wait for enough of them. Fewer when a request has finished before."""
    started = time.perf_counter()
    while True:
        ended = decoding.ended()
        steps = controller.num_timed(k, batch)
        slow = steps >= LEAST_STEPS and time.perf_counter() - started > LEAST_SECONDS
        if ended or slow or steps >= MOST_STEPS:
            return steps
        await asyncio.sleep(POLL_SECONDS)


class TimedRequests:
    """`Decoding` on vLLM's asynchronous engine."""

    def __init__(self, engine: Any, prompts: Sequence[list[int]], sampling: Any):
        """prompts: token ids, taken in turns. sampling: SamplingParams, which fix the length of the responses."""
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._numbers = itertools.count()
        self._names: list[str] = []
        self._outputs: list[asyncio.Task[None]] = []

    async def begin(self, batch: int) -> None:
        # Paused, so that all of them are prefilled together.
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        for number in itertools.islice(self._numbers, batch):
            name = f"timing{number}"
            prompt = {"prompt_token_ids": self._prompts[number % len(self._prompts)]}
            queue = await self._engine.add_request(name, prompt, self._sampling)
            self._names.append(name)
            self._outputs.append(asyncio.create_task(_finished(queue)))
        await self._engine.resume_generation()

    def ended(self) -> bool:
        return any(output.done() for output in self._outputs)

    async def end(self) -> None:
        names, outputs = self._names, self._outputs
        self._names, self._outputs = [], []
        if names:
            await self._engine.abort(names)
        await asyncio.gather(*outputs)  # an aborted request ends with an output too


async def _finished(queue: Any) -> None:
    while not (queue.get_nowait() or await queue.get()).finished:
        pass
