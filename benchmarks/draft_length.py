"""What the choice of the draft length is worth: decoding speed against no speculation, on a simulated engine.

    python -m benchmarks.draft_length [--seeds 40] [--shape CPU]

Step times and acceptance are those that docs/measurements/draft_length.md measured with SmolLM2 on two CPU cores (or `--shape GPU`, memory
bound), with noise on each step, late steps, and spells in which other programs slow the machine down. Each cell decodes
600 steps after the step times were measured, with 32 requests at most; the columns are the best fixed draft length, 0
included, chosen by hindsight, and the rule of cotrain/engine/speculation. Means over seeds and their standard errors;
times and tokens are taken without their noise. Prints a Markdown table.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cotrain.engine.speculation.draft_length import DraftLengths
from tests.cotrain.engine import simulated_engine
from tests.cotrain.engine.simulated_engine import BAD, COLLAPSED, GOOD, K, Shape, SimulatedEngine, Tally

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


def cells() -> dict[str, tuple[Sequence[float], Cell]]:
    """Name -> acceptance at the start, and what is decoded."""
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
            engine.measure(MAX_BATCH)
        tallies = decode(engine)
        result.append(sum(t.without for t in tallies) / sum(t.seconds for t in tallies))
    return np.array(result)


def main(rules: dict[str, Callable[[], Any]] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--shape", choices=("CPU", "GPU"), default="CPU")
    args = parser.parse_args()
    shape = getattr(simulated_engine, args.shape)
    rules = rules or {"chosen": lambda: DraftLengths(K, MAX_BATCH)}
    print(f"| drafter, requests at once | best fixed k | {' | '.join(rules)} |")
    print("|---|---|" + "---|" * len(rules))
    for cell in cells():
        best = max(speeds(lambda k=k: Fixed(k), cell, shape, 1)[0] for k in range(K + 1))
        found = [speeds(make, cell, shape, args.seeds) for make in rules.values()]
        words = [f"{v.mean():.3f} +- {v.std() / len(v) ** 0.5:.3f} (least {v.min():.2f})" for v in found]
        print(f"| {cell} | {best:.2f} | {' | '.join(words)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
