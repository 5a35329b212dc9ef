"""Generation of a step, simulated: engines with slots, their queues, prompts, drafts, and batches that drain."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Most tokens of context that an engine holds. A request begins when the whole of its own, at its end, fits."""

    def __post_init__(self) -> None:
        if min(self.count, self.max_num_seqs) < 1:
            raise ValueError(f"{self}: count and max_num_seqs are at least 1")


@dataclass(frozen=True)
class Generation:
    """What the responses of a step took. Counts are those of all engines together."""

    seconds: float
    """Until the last engine has ended."""
    engine_seconds: Array
    """[engines], until each has ended."""
    mean_batch: float
    """Requests that an engine runs at once while it has any."""
    steps: int
    tokens: int
    drafted: float
    accepted: float
    """With draft tokens past the end of a response, which are verified and then dropped."""
    verified_steps: float
    """Requests with draft tokens, summed over steps."""
    timeline: list[tuple[float, float]]
    """(seconds, running requests from then on)."""

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
    samples: int = 1,
) -> Generation:
    """Simulate responses of these lengths, which are dealt out to the engines as `deal` says.

    In each step all running requests of an engine advance by one token and the accepted drafts, up to their end. A freed slot
    takes the next request, whose prompt is computed first. prompt_tokens: of each, or of all. samples: requests of a prompt.
    Raises ValueError for input that does not fit together and for a request that no engine holds.
    """
    requests = np.array(lengths, np.int64)
    prompts = np.broadcast_to(np.array(prompt_tokens, np.int64), requests.shape)
    if not len(requests) or requests.min() < 1 or prompts.min() < 0:
        raise ValueError("give at least one response: lengths are 1 or more, prompt_tokens 0 or more")
    longest, kv_tokens = int((requests + prompts).max()), np.inf if engines.kv_tokens is None else engines.kv_tokens
    if longest > kv_tokens:
        raise ValueError(f"a request of {longest} tokens does not fit: an engine holds {kv_tokens} (kv_tokens)")
    shares = deal(requests, engines.count, samples, order)
    slots = min(engines.max_num_seqs, max(map(len, shares)))
    prices = Prices.of(cost, k, slots, acceptance)
    counts = Counter(steps=0, tokens=0, drafted=0, accepted=0, verified_steps=0)
    changes: list[tuple[float, int]] = []
    runs = [_Engine(cost, prices, rng, counts, changes) for rng in np.random.default_rng(seed).spawn(engines.count)]
    for run, share in zip(runs, shares, strict=True):
        run.run(requests[share], prompts[share], kv_tokens)
    changes.sort()
    running = np.cumsum([change for _, change in changes])
    seconds = np.array([run.clock for run in runs])
    return Generation(
        seconds=float(seconds.max()),
        engine_seconds=seconds,
        mean_batch=-sum(time * change for time, change in changes) / float(seconds.sum()),
        **counts,
        timeline=[(time, float(count)) for (time, _), count in zip(changes, running, strict=True)],
    )


def deal(lengths: Ints, engines: int, samples: int, order: Order) -> list[Ints]:
    """The requests of each engine in the order in which they begin. Groups of so many samples go to the engines in turn.

    longest_first begins with the groups whose responses turn out longest, as if their lengths were known before.
    """
    rank = np.arange(len(lengths)) // samples
    if order == "longest_first":
        means = np.bincount(rank, lengths) / np.bincount(rank)
        rank = np.argsort(np.argsort(-means, kind="stable"), kind="stable")[rank]
    begun = np.argsort(rank, kind="stable")
    return [begun[rank[begun] % engines == engine] for engine in range(engines)]


@dataclass(frozen=True)
class Prices:
    """What a step of each batch size, 0 to the largest, costs and accepts."""

    k: Ints
    base: Array
    slope: Array
    survival: dict[int, tuple[Array, Array]]
    """By k above 0: [d] first response tokens, [d, k] survival of draft positions from each of them on."""

    @classmethod
    def of(cls, cost: StepTime, k: DraftLengths, largest: int, acceptance: Acceptance | None) -> "Prices":
        """Raises ValueError for a k that lacks batch sizes, and for drafts of unknown acceptance."""
        by_batch = np.full(largest + 1, k) if np.ndim(k) == 0 else np.array(k)[: largest + 1]
        if len(by_batch) <= largest or by_batch.min() < 0:
            raise ValueError(f"k by batch size: give a number from 0 on for each of 0 to {largest} requests")
        base, slope = np.zeros(largest + 1), np.zeros(largest + 1)
        lengths = np.unique(by_batch[1:]).tolist()
        for length in lengths:
            at = 1 + np.flatnonzero(by_batch[1:] == length)
            base[at], slope[at] = cost.base(length, at.astype(float)), cost.slope(length)
        if any(lengths) and acceptance is None:
            raise ValueError("draft tokens of unknown acceptance: give an acceptance, or k = 0")
        return cls(by_batch, base, slope, {n: acceptance.at_depth(n) for n in lengths if n and acceptance})


@dataclass
class _Engine:
    """An engine goes from span to span, in each of which the same requests run with the same draft length."""

    cost: StepTime
    prices: Prices
    rng: np.random.Generator
    counts: Counter[str]
    """Fields of Generation; it and the next are those of all engines."""
    changes: list[tuple[float, int]]
    """(seconds, requests that begin, or minus those that end)."""
    clock: float = 0.0

    def run(self, lengths: Ints, prompts: Ints, kv_tokens: float) -> None:
        held, slots = lengths + prompts, len(self.prices.k) - 1
        done = np.zeros_like(lengths)
        running, queue = np.zeros(0, np.int64), np.arange(len(lengths))
        while len(queue) or len(running):
            admitted = queue[: slots - len(running)]
            admitted = admitted[held[running].sum() + np.cumsum(held[admitted]) <= kv_tokens]
            queue = queue[len(admitted) :]
            if len(admitted):
                # Sorted, so that what is drawn does not depend on the order of requests which begin together.
                running = np.append(running, admitted[np.lexsort((prompts[admitted], lengths[admitted]))])
                self.changes.append((self.clock, len(admitted)))
                self.clock += float(self.cost.prefill(float(prompts[admitted].sum())))
            context = int((prompts + done)[running].sum())
            advance = self._decode(done[running], lengths[running] - done[running], context)
            done[running] += advance
            self.counts["tokens"] += int(advance.sum())
            goes_on = done[running] < lengths[running]
            if not goes_on.all():
                self.changes.append((self.clock, int(goes_on.sum()) - len(running)))
                running = running[goes_on]

    def _decode(self, done: Ints, left: Ints, context: int) -> Ints:
        """[requests] tokens emitted in the steps until one of them ends, or somewhat before."""
        batch = len(done)
        k = int(self.prices.k[batch])
        if k == 0:
            steps = int(left.min())
            advance = np.full(batch, steps)
            read = steps * context + batch * (steps * (steps - 1) // 2)
        else:
            drawn = self._draw(k, done, left)
            steps = drawn.shape[1]
            advance = drawn.sum(1)
            read = steps * context + int(drawn.sum(0) @ np.arange(steps - 1, -1, -1))
            self.counts.update(verified_steps=batch * steps, accepted=int(advance.sum()) - batch * steps)
        self.counts.update(steps=steps, drafted=batch * k * steps)
        self.clock += float(steps * self.prices.base[batch] + read * self.prices.slope[batch])
        return np.minimum(advance, left)

    def _draw(self, k: int, done: Ints, left: Ints) -> Ints:
        """[requests, steps] tokens of each step, up to the first in which a request ends or its acceptance changes.

        A number between 0 and 1 that lies below the survival of j positions means that at least j tokens are accepted.
        """
        starts, survival = self.prices.survival[k]
        depth = np.searchsorted(starts, done, side="right")
        end = np.minimum(left, np.append(starts[1:], np.inf)[depth - 1] - done)
        rates = survival[depth - 1].astype(np.float32)
        steps = min(int(end.min() / (1 + rates.sum(1).max())) + 2, max(MOST_DRAWS // len(left), 1))
        numbers = self.rng.random((len(left), steps), np.float32)
        drawn = np.ones(numbers.shape, np.int64)
        for position in range(k):
            drawn += numbers < rates[:, position, None]
        over = (np.cumsum(drawn, axis=1) >= end[:, None]).any(0)
        return drawn[:, : int(over.argmax()) + 1] if over.any() else drawn
