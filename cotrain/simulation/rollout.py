"""Generation of a step, simulated: engines with slots, their queues, prompts, drafts, and batches that drain."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.step_time import Array, StepTime

DraftLengths = int | Sequence[int]
"""Draft tokens of each request and step: a number, or numbers by batch size, of which the one at 0 is not used."""

Order = Literal["drawn", "longest_first"]
Ints = NDArray[np.int64]

MOST_DRAWS = 1 << 18
"""Draws of accepted tokens made at once, which bounds the memory."""


@dataclass(frozen=True)
class Engines:
    count: int
    max_num_seqs: int
    kv_tokens: int | None = None
    """Most tokens of context that an engine holds. A request waits until the whole of its own fits."""

    def __post_init__(self) -> None:
        for name in ("count", "max_num_seqs", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of the engines is {value}: at least 1")


@dataclass(frozen=True)
class Generation:
    """What the responses of a step took."""

    seconds: float
    """Until the last engine has ended."""
    engine_seconds: Array
    """[engines], until each has ended."""
    steps: int
    """Decode steps of all engines."""
    tokens: int
    drafted: float
    accepted: float
    """Draft tokens that verification accepted, with those past the end of a response, which are dropped."""
    verified_steps: float
    """Requests with draft tokens, summed over steps."""
    decode_seconds: float
    """Of all engines together, as the next."""
    prefill_seconds: float
    timeline: list[tuple[float, float]]
    """(seconds, running requests of all engines from then on)."""

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verification step emitted on average; 1 without any."""
        return 1.0 + self.accepted / max(self.verified_steps, 1.0)

    @property
    def busy(self) -> float:
        """Share of the time in which an engine has work, mean over engines."""
        return float(self.engine_seconds.mean()) / self.seconds if self.seconds else 1.0


def generate(
    cost: StepTime,
    lengths: Sequence[int],
    prompt_tokens: Sequence[int] | int,
    engines: Engines,
    k: DraftLengths,
    acceptance: Acceptance | None,
    seed: int = 0,
    order: Order = "drawn",
) -> Generation:
    """Simulate responses of these lengths, dealt out to the engines in turn.

    An engine runs as many requests as it has slots. All running ones advance in each step by one token and the accepted
    drafts, up to their end; a freed slot takes the next request, whose prompt is computed first. prompt_tokens: of each
    request, or of all. Raises ValueError for input that does not fit together and for a request that no engine can hold.
    """
    requests, prompts = requests_of(lengths, prompt_tokens)
    _check_capacity(requests, prompts, engines)
    dealt = np.arange(len(requests)) if order == "drawn" else np.argsort(-requests, kind="stable")
    shares = [dealt[engine :: engines.count] for engine in range(engines.count)]
    slots = min(engines.max_num_seqs, max(map(len, shares)))
    prices = Prices.of(cost, draft_lengths(k, engines.max_num_seqs, acceptance)[: slots + 1], acceptance)
    streams = np.random.default_rng(seed).spawn(engines.count)
    runs = [
        _Engine(cost, prices, slots, engines.kv_tokens, rng).run(requests[share], prompts[share])
        for share, rng in zip(shares, streams, strict=True)
    ]
    seconds = np.array([run.clock for run in runs])
    changes = sorted((time, change) for run in runs for time, change in run.changes)
    running = np.cumsum([change for _, change in changes])
    return Generation(
        seconds=float(seconds.max()),
        engine_seconds=seconds,
        steps=sum(run.steps for run in runs),
        tokens=sum(run.tokens for run in runs),
        drafted=float(sum(run.drafted for run in runs)),
        accepted=float(sum(run.accepted for run in runs)),
        verified_steps=float(sum(run.verified for run in runs)),
        decode_seconds=float(seconds.sum() - sum(run.prefill for run in runs)),
        prefill_seconds=float(sum(run.prefill for run in runs)),
        timeline=[(time, float(count)) for (time, _), count in zip(changes, running, strict=True)],
    )


def requests_of(lengths: Sequence[int], prompt_tokens: Sequence[int] | int) -> tuple[Ints, Ints]:
    """[n] response and [n] prompt lengths. Raises ValueError without requests, or where the two do not belong together."""
    requests, prompts = np.asarray(lengths, np.int64), np.asarray(prompt_tokens, np.int64)
    if requests.ndim != 1 or not len(requests) or requests.min() < 1 or prompts.min() < 0:
        raise ValueError("lengths: give at least one response, each of 1 token or more, to prompts of 0 or more")
    if prompts.ndim and prompts.shape != requests.shape:
        raise ValueError(
            f"{len(prompts)} prompt lengths for {len(requests)} responses: give one for each, or one for all"
        )
    return requests, np.broadcast_to(prompts, requests.shape)


def draft_lengths(k: DraftLengths, max_num_seqs: int, acceptance: Acceptance | None) -> list[int]:
    """[max_num_seqs + 1] draft length by batch size. Raises ValueError for another number of them, or where drafts of
    unknown acceptance are to be made."""
    by_batch = [k] * (max_num_seqs + 1) if isinstance(k, int | np.integer) else [int(n) for n in k]
    if len(by_batch) != max_num_seqs + 1 or min(by_batch) < 0:
        raise ValueError(
            f"k by batch size has {len(by_batch)} entries: give one from 0 on for each batch size 0 to {max_num_seqs}"
        )
    if acceptance is None and any(by_batch[1:]):
        raise ValueError("draft tokens of unknown acceptance: give an acceptance, or k = 0")
    return [int(n) for n in by_batch]


def _check_capacity(requests: Ints, prompts: Ints, engines: Engines) -> None:
    longest = int((requests + prompts).max())
    if engines.kv_tokens is not None and longest > engines.kv_tokens:
        raise ValueError(
            f"a request of {longest} tokens does not fit an engine that holds {engines.kv_tokens} (kv_tokens): "
            "shorten the responses, or give the engine more memory"
        )


@dataclass(frozen=True)
class Prices:
    """Tables of what a step of each batch size costs and accepts."""

    k: list[int]
    """By batch size, as the next two."""
    base: Array
    slope: Array
    survival: dict[int, tuple[Array, Array]]
    """By k above 0: [d] first response tokens, [d, k] survival of draft positions from each of them on."""

    @classmethod
    def of(cls, cost: StepTime, k: list[int], acceptance: Acceptance | None) -> "Prices":
        base, slope = np.zeros(len(k)), np.zeros(len(k))
        batches = np.arange(len(k))
        for length in set(k[1:]):
            at = batches[(np.array(k) == length) & (batches > 0)]
            base[at], slope[at] = cost.base(length, at.astype(float)), cost.slope(length)
        drafting = set(k[1:]) - {0} if acceptance is not None else ()
        return cls(k, base, slope, {length: acceptance.at_depth(length) for length in drafting if acceptance})


@dataclass
class _Engine:
    """One engine, from span to span: in a span the running requests stay the same, and so does the draft length."""

    cost: StepTime
    prices: Prices
    slots: int
    kv_tokens: int | None
    rng: np.random.Generator
    clock: float = 0.0
    prefill: float = 0.0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)

    def run(self, lengths: Ints, prompts: Ints) -> "_Engine":
        queue = deque(range(len(lengths)))
        running = np.zeros(0, np.int64)
        done = np.zeros_like(lengths)
        held = lengths + prompts
        while queue or len(running):
            admitted: list[int] = []
            room = np.inf if self.kv_tokens is None else self.kv_tokens - held[running].sum()
            while queue and len(running) + len(admitted) < self.slots and held[queue[0]] <= room:
                room -= held[queue[0]]
                admitted.append(queue.popleft())
            if admitted:
                running = np.append(running, admitted)
                seconds = float(self.cost.prefill(float(prompts[admitted].sum())))
                self.clock += seconds
                self.prefill += seconds
                self.changes.append((self.clock - seconds, len(admitted)))
            advance = self._span(lengths[running], done[running], int(prompts[running].sum()))
            done[running] += advance
            self.tokens += int(advance.sum())
            over = done[running] == lengths[running]
            if over.any():
                self.changes.append((self.clock, -int(over.sum())))
                running = running[~over]
        return self

    def _span(self, lengths: Ints, done: Ints, prompts: int) -> Ints:
        """[requests] tokens until one of them ends, reaches a depth of another acceptance, or enough was drawn."""
        batch = len(lengths)
        k, base, slope = self.prices.k[batch], self.prices.base[batch], self.prices.slope[batch]
        left = lengths - done
        context = prompts + int(done.sum())
        if k == 0:
            steps = int(left.min())
            before = batch * (steps * (steps - 1) // 2)
            total = np.full(batch, steps)
        else:
            advance = self._drawn(k, done, left)
            steps = advance.shape[1]
            total = advance.sum(1)
            self.verified += batch * steps
            self.accepted += int(total.sum()) - batch * steps
            before = int((advance.sum(0) * np.arange(steps - 1, -1, -1)).sum())
        self.steps += steps
        self.drafted += batch * k * steps
        self.clock += float(steps * base + slope * (steps * context + before))
        return np.minimum(total, left)

    def _drawn(self, k: int, done: Ints, left: Ints) -> Ints:
        """[requests, steps] tokens that each step emits, up to the step in which the span ends."""
        starts, survival = self.prices.survival[k]
        depth = np.searchsorted(starts, done, side="right")
        end = np.minimum(left, np.append(starts, np.inf)[depth] - done)
        rates = survival[depth - 1].astype(np.float32)
        steps = int(end.min() / (1 + rates.sum(1).max())) + 2
        steps = min(steps, max(MOST_DRAWS // len(left), 1))
        draws = self.rng.random((len(left), steps), np.float32)
        advance = np.ones(draws.shape, np.int64)
        for position in range(k):
            advance += draws < rates[:, position, None]
        ended = (np.cumsum(advance, axis=1) >= end[:, None]).any(0)
        return advance[:, : int(ended.argmax()) + 1] if ended.any() else advance
