"""An engine with a clock and nothing else: steps that take what a table says, drafts accepted by coin flips.

It drives the real DraftLengths the way vLLM's scheduler does. Used by tests and by benchmarks/draft_length.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotrain.engine.speculation.draft_length import Step
from cotrain.engine.speculation.step_costs import ratio_at

K = 3


@dataclass(frozen=True)
class Shape:
    """Seconds of a step without speculation, and t_k / t_0 for k = 1 to 3, log-linear between these batch sizes. The batch pays
    for its first draft as much as cotrain/engine/speculation/step_costs.py says."""

    batches: tuple[int, ...]
    without: tuple[float, ...]
    ratios: tuple[tuple[float, ...], ...]

    def seconds(self, verified: float, drafted: float, batch: int) -> float:
        """Verification and drafting cost the same, so that a step at a change of length lies in between."""
        where, at = np.log(batch), np.log(self.batches)
        without = np.exp(np.interp(where, at, np.log(self.without)))
        ratios = [1.0] + [float(np.interp(where, at, column)) for column in zip(*self.ratios, strict=True)]
        return float(without * ratio_at(ratios, (verified + drafted) / 2))


# SmolLM2-135M on two CPU cores: the ratios that the table of docs/measurements/draft_length.md has with GOOD and BAD
CPU = Shape(
    (1, 4, 16, 32),
    (0.0219, 0.0226, 0.0426, 0.080),
    ((1.23, 1.30, 1.41), (1.30, 1.55, 1.76), (1.42, 1.90, 2.25), (1.53, 2.05, 2.77)),
)
# Memory-bound: verification is nearly free, drafting takes the host 0.7 ms a token
GPU = Shape(
    (1, 4, 16, 32),
    (0.0100, 0.0102, 0.0110, 0.0120),
    ((1.10, 1.16, 1.22), (1.11, 1.18, 1.25), (1.14, 1.24, 1.33), (1.20, 1.33, 1.47)),
)

GOOD, BAD, COLLAPSED = (0.53, 0.64, 0.62), (0.27, 0.42, 0.40), (0.05, 0.1, 0.1)
EXCELLENT, POOR = (0.8, 0.8, 0.8), (0.2, 0.2, 0.2)
"""Conditional acceptance by position."""

LOADED = (1.0, 0.96, 0.82, 0.95)
"""t_k / t_0 that a run on a loaded machine measured at its start."""


def expected_tokens(rates: Sequence[float], k: int) -> float:
    return 1.0 + float(np.cumprod(rates[:k]).sum())


def speed_of_fixed(shape: Shape, rates: Sequence[float], batch: int, k: int) -> float:
    """Against no speculation, with the same draft length throughout."""
    return expected_tokens(rates, k) * shape.seconds(0, 0, batch) / shape.seconds(k, k, batch)


def best_fixed(shape: Shape, rates: Sequence[float], batch: int) -> float:
    return max(speed_of_fixed(shape, rates, batch, k) for k in range(K + 1))


@dataclass(frozen=True)
class Noise:
    """Noise of single steps, and that of a machine that others use too."""

    steps: float = 0.12
    """Standard deviation of log seconds."""
    late: float = 0.02
    """Share of steps that take LATE_FACTOR times as long."""
    slow_every: float = 40.0
    """Mean seconds between two slow spells; they last a tenth of it, and take SLOW_FACTOR times as long."""


LATE_FACTOR, SLOW_FACTOR = 4.0, 1.5
NOISY, QUIET = Noise(), Noise(0.02, 0.0, float("inf"))


class Tally:
    """Time and tokens with all noise taken out, so that a short run shows what the choices are worth."""

    def __init__(self) -> None:
        self.seconds = self.without = 0.0
        self.num_drafts = 0
        self.lengths: list[int] = []

    @property
    def speed(self) -> float:
        """Against no speculation."""
        return self.without / self.seconds


class SimulatedEngine:
    """One engine. rule: a DraftLengths, or what vLLM's scheduler would call in place of one."""

    def __init__(self, rule: Any, shape: Shape, rates: Sequence[float], noise: Noise = NOISY, seed: int = 0):
        self.rule, self.shape, self.rates, self.noise = rule, shape, rates, noise
        self.looks_up = 1.0
        """Below 1: share of the requests for which an index, whose drafts cost nothing, has one."""
        self.seeming: Sequence[float] | None = None
        """t_k / t_0 as the clock shows it while something disturbs the machine."""
        self.random = np.random.default_rng(seed)
        self.now, self.slow_down = 0.0, 1.0
        self._pending, self._slow, self._spell_ends = 0, False, 0.0

    def learn(self, by_request: bool = False, steps: int = 120) -> None:
        """Let the rule choose, and decode so many steps at each batch size that it keeps costs of."""
        self.rule.adapt(by_request)
        for size in self.rule._costs.sizes:
            self.run(size, steps)

    def run(self, batch: int, steps: int) -> Tally:
        """Decode with a constant batch, one engine step after the other."""
        tally = Tally()
        for _ in range(steps):
            self.step(batch, tally)
        return tally

    def drain(self, lengths: Sequence[float]) -> Tally:
        """Decode one batch of requests of these many tokens until the last has finished."""
        tally, left = Tally(), np.array(lengths, float)
        self.step(len(left), tally, prefill=True)
        while len(left):
            left = left - self.step(len(left), tally)
            left = left[left > 0]
        self.rule.idle(self.now)
        self._pending = 0
        return tally

    def step(self, batch: int, tally: Tally, prefill: bool = False) -> np.ndarray:
        """Tokens that each request got."""
        drafted = self.rule.choose(self.now)[batch]
        planned = verified = 0 if prefill else self._pending
        hits = self.random.random((batch, K)) < np.array(self.rates)
        accepted = np.minimum(np.cumprod(hits, axis=1).sum(1), verified)
        drafts = [(verified, int(a)) for a in accepted] if verified else []
        of_step = drafted
        if self.looks_up < 1:
            has = self.random.random(batch) < self.looks_up
            accepted, drafts = accepted * has, [draft for draft, there in zip(drafts, has, strict=False) if there]
            of_step = verified = sum(number for number, _ in drafts) / batch
        self.rule.observe(Step(drafted, batch, prefill, drafts, int(batch + accepted.sum())))
        seconds = self.slow_down * self.shape.seconds(verified, of_step, batch)
        self.now += self._shown(seconds, (verified + of_step) / 2, batch) * self._disturbance()
        self._pending = drafted
        if not prefill:
            without = self.slow_down * self.shape.seconds(0, 0, batch)
            tally.seconds += seconds
            tally.without += (expected_tokens(self.rates, planned) * self.looks_up + 1 - self.looks_up) * without
            tally.num_drafts += batch * (verified > 0)
            tally.lengths.append(drafted)
        return 1 + accepted

    def _shown(self, seconds: float, length: float, batch: int) -> float:
        if self.seeming is None:
            return seconds
        return self.slow_down * self.shape.seconds(0, 0, batch) * float(np.interp(length, range(K + 1), self.seeming))

    def _disturbance(self) -> float:
        if self.now > self._spell_ends:
            self._slow = not self._slow if self._spell_ends else False
            mean = self.noise.slow_every / (10 if self._slow else 1)
            self._spell_ends = self.now + self.random.exponential(mean) if np.isfinite(mean) else np.inf
        late = LATE_FACTOR if self.random.random() < self.noise.late else 1.0
        slow = SLOW_FACTOR if self._slow else 1.0
        return late * slow * float(np.exp(self.noise.steps * self.random.standard_normal()))
