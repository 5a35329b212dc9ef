"""An engine with a clock and nothing else: steps that take what a table says, drafts accepted by coin flips.

It drives the real StepPlanner through the real shared files, the way vLLM's scheduler does.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cotrain.config.speculation import SpeculationConfig
from cotrain.rollout.speculation.controller import SpeculationController
from cotrain.rollout.speculation.draft_length_table import DraftLengthTable, StepLog
from cotrain.rollout.speculation.step_planner import StepPlanner

K = 3
UPDATE_SECONDS = 1.0


@dataclass(frozen=True)
class Shape:
    """Seconds of a step at a few batch sizes, log-linear between: without speculation, and what k=2 adds."""

    batches: tuple[int, ...]
    base: tuple[float, ...]
    extra: tuple[float, ...]

    def seconds(self, verified: float, drafted: float, batch: int) -> float:
        """Half of the extra time is verification, half is drafting."""
        base, extra = (
            np.exp(np.interp(np.log(batch), np.log(self.batches), np.log(t))) for t in (self.base, self.extra)
        )
        share = 0.1 * (verified > 0) + 0.1 * (drafted > 0) + 0.2 * (verified + drafted)  # 0.6, 1.0, 1.4 for k = 1, 2, 3
        return float(base + extra * share)


# SmolLM2-135M on two CPU cores: 45.6, 177, 376 tokens/s without; 49.2, 117, 152 at k=2 with an acceptance length of 1.57
CPU = Shape((1, 4, 16, 32), (0.0219, 0.0226, 0.0426, 0.080), (0.0100, 0.0311, 0.1226, 0.250))
# Memory-bound: verification is nearly free, drafting takes the host 0.7 ms a token
GPU = Shape((1, 4, 16, 32), (0.0100, 0.0102, 0.0110, 0.0120), (0.0016, 0.0018, 0.0026, 0.0040))

GOOD, WEAK, BAD = (0.66, 0.55, 0.5), (0.40, 0.42, 0.4), (0.08, 0.1, 0.1)
"""Conditional acceptance by position. WEAK has the acceptance length 1.57 at k=2."""


def expected_tokens(rates: Sequence[float], k: int) -> float:
    return 1.0 + float(np.cumprod(rates[:k]).sum())


def rate_of_fixed(shape: Shape, rates: Sequence[float], batch: int, k: int) -> float:
    """Tokens per second with the same draft length throughout."""
    return batch * expected_tokens(rates, k) / shape.seconds(k, k, batch)


def best_fixed(shape: Shape, rates: Sequence[float], batch: int) -> float:
    return max(rate_of_fixed(shape, rates, batch, k) for k in range(K + 1))


@dataclass
class Tally:
    """Time and tokens with all noise taken out, so that a short run shows what the choices are worth."""

    seconds: float = 0.0
    tokens: float = 0.0
    trial_seconds: float = 0.0
    without: float = 0.0
    drafts: int = 0  # verification steps, over all requests
    chosen: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class SimulatedEngine:
    """One engine, its planner and its controller."""

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        rates: Sequence[float],
        max_batch: int = 32,
        noise: float = 0.15,
        outliers: float = 0.02,
        seed: int = 0,
        **config: object,
    ):
        self.shape, self.rates, self.noise, self.outliers = shape, rates, noise, outliers
        self.random = np.random.default_rng(seed)
        self.controller = SpeculationController(SpeculationConfig(**config), K, max_batch, folder)  # type: ignore[arg-type]
        table, log = DraftLengthTable(self.controller.table_path), StepLog(self.controller.log_path, K)
        self.planner = StepPlanner(table, log, max_batch, K)
        self.now = self._updated = 0.0
        self._pending = 0
        self.slow_down = 1.0

    def calibrate(self, steps: int = 8) -> None:
        def measure(k: int, batch: int) -> list[float]:
            self.controller.fix_draft_tokens(k)
            self.run(batch, steps + 2, update=False)
            return self.controller.take_timing(k, batch)

        self.learn(measure)

    def learn(self, measure: Callable[[int, int], Sequence[float]]) -> None:
        """Give the controller what `measure` says that steps of a draft length and batch size take."""
        self.controller.begin_timing()
        for round_number in itertools.count():
            plan = self.controller.timing_plan(round_number)
            if not plan:
                return
            self.controller.learn_timings([(k, batch, measure(k, batch)) for k, batch in plan])

    def run(self, batch: int, steps: int, update: bool = True) -> Tally:
        """Decode with a constant batch, one engine step after the other."""
        tally = Tally()
        for _ in range(steps):
            self.step(batch, tally, update)
        return tally

    def drain(self, lengths: Sequence[int], update: bool = True) -> Tally:
        """Decode one batch of requests of these many tokens until the last has finished."""
        tally, left = Tally(), np.array(lengths, float)
        self.step(len(left), tally, update, prefill=True)
        while len(left):
            left = left - self.step(len(left), tally, update)
            left = left[left > 0]
        self.planner.idle(self.now)
        self._pending = 0
        return tally

    def step(self, batch: int, tally: Tally, update: bool = True, prefill: bool = False) -> np.ndarray:
        """Tokens that each request got."""
        drafted = self.planner.draft_lengths(self.now)[batch]
        verified = 0 if prefill else self._pending
        self.planner.scheduled(batch, drafted, [verified] * batch, prefill)
        hits = self.random.random((batch, K)) < np.array(self.rates)
        accepted = np.minimum(np.cumprod(hits, axis=1).sum(1), verified)
        self.planner.verified([(verified, int(a)) for a in accepted] if verified else [], int(batch + accepted.sum()))
        seconds = self.slow_down * self.shape.seconds(verified, drafted, batch)
        noisy = seconds * np.exp(self.noise * self.random.standard_normal())
        self.now += noisy * (5.0 if self.random.random() < self.outliers else 1.0)
        self._pending = drafted
        tally.drafts += batch * (verified > 0)
        if not prefill:
            trial = drafted != self.controller.draft_tokens[batch - 1]
            tally.seconds += seconds
            tally.trial_seconds += seconds if trial else 0.0
            tally.tokens += batch * expected_tokens(self.rates, verified)
            tally.without += expected_tokens(self.rates, verified) * self.slow_down * self.shape.seconds(0, 0, batch)
            tally.chosen.append(self.controller.draft_tokens[batch - 1])
        if update and self.now > self._updated + UPDATE_SECONDS:
            self._updated = self.now
            self.controller.update()
        return 1 + accepted
