"""What the choice of the draft length is worth: decoding speed against no speculation, on a simulated engine.

    python -m benchmarks.draft_length [--seeds 40] [--shape CPU] [--only flips]

Step times and acceptance are those that docs/measurements/draft_length.md measured with SmolLM2 on two CPU cores (or `--shape GPU`, memory
bound), with noise on each step, late steps, and spells in which other programs slow the machine down. Each cell decodes
600 steps after the step times were measured, with 32 requests at most; the columns are the best fixed draft length, 0
included, chosen by hindsight, the rule of cotrain/engine/speculation, and its share of the best. Means over seeds and their standard
errors; times and tokens are taken without their noise. Prints a Markdown table.

The rows of `--only flips` decode 1,000 steps. Then acceptance changes, and the next 1,000 or 500 steps count. The rows of `--only noise`
count 1,000 steps after a start in which a step with two drafts seems to take 0.82 times one without (as in a run on a loaded machine),
while it takes 1.3 to 1.9 times as long.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import numpy as np

from cotrain.engine.speculation.draft_length import DraftLengths
from cotrain.run import provenance
from tests.cotrain.engine import simulated_engine
from tests.cotrain.engine.simulated_engine import (
    BAD,
    COLLAPSED,
    EXCELLENT,
    GOOD,
    LOADED,
    POOR,
    K,
    Shape,
    SimulatedEngine,
    Tally,
)

MAX_BATCH, STEPS = 32, 600

Cell = Callable[[SimulatedEngine], list[Tally]]


class Fixed:
    """The same draft length in every step."""

    def __init__(self, num_speculative_tokens: int):
        self._lengths = [num_speculative_tokens] * (MAX_BATCH + 1)

    def choose(self, now: float) -> Sequence[int]:
        return self._lengths

    def observe(self, *step: Any) -> None:
        pass

    def idle(self, now: float) -> None:
        pass

    def new_drafter(self, rates: Any = None) -> None:
        pass


def constant(rates: Sequence[float], batch: int) -> Cell:
    def decode(engine: SimulatedEngine) -> list[Tally]:
        return [engine.run(batch, STEPS)]

    return decode


def draining(rates: Sequence[float]) -> Cell:
    def decode(engine: SimulatedEngine) -> list[Tally]:
        lengths = np.random.default_rng(1).exponential(40, (6, 16)).clip(8, 128)
        return [engine.drain(row) for row in lengths]

    return decode


def swapped(after: Sequence[float], batch: int, promised: bool) -> Cell:
    """Another drafter from step 200 on; where it is promised, the trainer's evaluation comes with it."""

    def decode(engine: SimulatedEngine) -> list[Tally]:
        before = engine.run(batch, 200)
        engine.rates = after
        if promised:
            engine.rule.new_drafter(np.cumprod(after).tolist())
        return [before, engine.run(batch, STEPS)]

    return decode


def flipped(after: Sequence[float], batch: int, steps: int) -> Cell:
    """Acceptance changes by itself; only what follows counts."""

    def decode(engine: SimulatedEngine) -> list[Tally]:
        engine.run(batch, 1000)
        engine.rates = after
        return [engine.run(batch, steps)]

    return decode


def after_noise(batch: int) -> Cell:
    def decode(engine: SimulatedEngine) -> list[Tally]:
        engine.seeming = LOADED
        engine.run(batch, 100)
        engine.seeming = None
        return [engine.run(batch, 1000)]

    return decode


def cells() -> dict[str, tuple[Sequence[float], Cell]]:
    """Name -> acceptance at the start, and what is decoded."""
    found: dict[str, tuple[Sequence[float], Cell]] = {}
    for batch in (1, 4, 16):
        found[f"flips, collapsed to excellent, {batch}"] = COLLAPSED, flipped(EXCELLENT, batch, 1000)
        found[f"flips, excellent to collapsed, {batch}"] = EXCELLENT, flipped(COLLAPSED, batch, 500)
        found[f"noise at the start, poor, {batch}"] = POOR, after_noise(batch)
    return found | steady_cells()


def steady_cells() -> dict[str, tuple[Sequence[float], Cell]]:
    found: dict[str, tuple[Sequence[float], Cell]] = {}
    for name, rates in (("good", GOOD), ("bad", BAD)):
        found |= {f"{name}, {batch}": (rates, constant(rates, batch)) for batch in (1, 4, 16, 32)}
        found[f"{name}, 16 to 1"] = rates, draining(rates)
    for batch in (1, 4):
        found[f"bad, good from step 200 as promised, {batch}"] = BAD, swapped(GOOD, batch, True)
        found[f"bad, good from step 200 in silence, {batch}"] = BAD, swapped(GOOD, batch, False)
        found[f"good, collapses at step 200, {batch}"] = GOOD, swapped(COLLAPSED, batch, False)
    return found


def speeds(make_rule: Callable[[], Any], cell: str, shape: Shape, seeds: int) -> np.ndarray:
    """[seeds]"""
    rates, decode = cells()[cell]
    result = []
    for seed in range(seeds):
        engine = SimulatedEngine(make_rule(), shape, rates, seed=seed)
        if not isinstance(engine.rule, Fixed):
            engine.rule.adapt()
        tallies = decode(engine)
        result.append(sum(t.without for t in tallies) / sum(t.seconds for t in tallies))
    return np.array(result)


def main(rules: dict[str, Callable[[], Any]] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--shape", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name has this word")
    args = parser.parse_args()
    shape = getattr(simulated_engine, args.shape)
    rules = rules or {"chosen": lambda: DraftLengths(K, MAX_BATCH)}
    print(f"{args.shape}, {args.seeds} seeds, {provenance.machine()['cpu']}, {date.today()}\n")
    print(f"| drafter, requests at once | best fixed k | {' | '.join(rules)} | share of the best |")
    print("|---|---|" + "---|" * (len(rules) + 1))
    for cell in (name for name in cells() if args.only in name):
        best = max(speeds(lambda k=k: Fixed(k), cell, shape, 1)[0] for k in range(K + 1))
        found = [speeds(make, cell, shape, args.seeds) for make in rules.values()]
        words = [f"{v.mean():.3f} +- {v.std() / len(v) ** 0.5:.3f} (least {v.min():.2f})" for v in found]
        shares = " ".join(f"{v.mean() / best:.3f}" for v in found)
        print(f"| {cell} | {best:.2f} | {' | '.join(words)} | {shares} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
