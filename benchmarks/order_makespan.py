"""What is it worth to begin with the prompts whose responses were the longest? Makespan against the order drawn.

    python -m benchmarks.order_makespan [--steps 40] [--epochs 4]
    python -m benchmarks.order_makespan --run RUN...
    python -m benchmarks.order_makespan --study runs/order

Log-normal lengths (mean 2000, at most 16,384) of 64 prompts with 8 samples each, of whose log-variance a share is between
prompts. LengthHistory learns the lengths of the epochs before, truncated ones as such. Steps take the same time whatever they
compute. Means over independent steps and their standard errors of makespan drawn / makespan longest first. Prints a Markdown
table.

--run: folders of runs, whose lengths are taken from stream.jsonl. Their steps are learnt one after another, and those with a
prompt that had come before are compared, with half as many slots as a step has requests, on all engines together. The share
between prompts is that of all groups.

--study: the folder of configs/studies/order, whose two arms generate the same text. Seconds of generation in the order drawn
over those with the longest first, by step, beside the makespans that the lengths of these steps would have if all engine
steps took the same time. The first step, before which nothing is known, has a line of its own.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from cotrain.run.rows import read_rows
from cotrain.stream.lengths import LengthHistory, order_speedup

PROMPTS, SAMPLES, MEAN, CAP, SPREAD = 64, 8, 2000.0, 16_384, 0.9
ENGINES = ((1, 128), (2, 64), (4, 32), (4, 128))

Step = dict[str, list[int]]
"""Lengths of the samples of each prompt, in the order drawn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="independent steps of each cell (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs before that are known (default %(default)s)")
    parser.add_argument("--run", type=Path, nargs="+", metavar="RUN", help="folders of runs with recorded lengths")
    parser.add_argument("--study", type=Path, metavar="STUDY", help="folder of the study of two orders")
    args = parser.parse_args()
    if args.study:
        measured(args.study)
        return
    if args.run:
        head(["run", "steps compared", "share between prompts", "1 engine", "2", "4"])
        for folder in args.run:
            print(f"| {folder.name} | {recorded(folder)} |")
        return
    head(["share between prompts", *(f"{e} x {s} slots" for e, s in ENGINES)])
    for share in (0.8, 0.5, 0.3, 0.0):
        cells = [simulated(share, seed, args.epochs) for seed in range(args.steps)]
        print(f"| {share} | {means(cells)} |")


def simulated(share: float, seed: int, epochs: int) -> list[float]:
    """The ratio for each of ENGINES, and what `quality` tells."""
    history = LengthHistory()
    *known, step = islice(epochs_of_lengths(share, seed), epochs + 1)
    for epoch in known:
        learn(history, epoch, CAP)
    found = ratios(history, step, ENGINES)
    learn(history, step, CAP)
    return found + quality(history)


def epochs_of_lengths(share: float, seed: int) -> Iterator[Step]:
    """Epochs of the same prompts, without end."""
    generator = np.random.default_rng(seed)
    of_prompt = generator.normal(0.0, SPREAD * share**0.5, PROMPTS)
    while True:
        own = generator.normal(0.0, SPREAD * (1 - share) ** 0.5, (PROMPTS, SAMPLES))
        free = MEAN * np.exp(of_prompt[:, None] + own - SPREAD**2 / 2)
        yield {str(prompt): row for prompt, row in enumerate(np.clip(free, 1, CAP).astype(int).tolist())}


def recorded(folder: Path) -> str:
    """The cells of a run."""
    cap = json.loads((folder / "config.json").read_text())["rollout"]["max_new_tokens"]
    steps = recorded_steps(folder)
    history, seen, found = LengthHistory(), set[str](), []
    for step in steps:
        slots = sum(map(len, step.values())) // 2
        if seen & step.keys():
            found.append(ratios(history, step, [(engines, max(1, slots // engines)) for engines in (1, 2, 4)]))
        learn(history, step, cap)
        seen |= step.keys()
    compared = f"{len(found)} of {len(steps)}"
    if not found:
        return f"{compared} | {'no prompt came twice' if steps else 'no lengths are recorded'}" + " |" * 5
    share = between([lengths for step in steps for lengths in step.values()])
    return f"{compared} | {share:.2f} | {means(found)} | " + " | ".join(f"{value:.2f}" for value in quality(history))


def measured(study: Path) -> None:
    """Print a table of the seconds that two runs of each seed took for the same text."""
    seconds, makespans, same = list[list[float]](), list[list[float]](), True
    for drawn in sorted((study / "runs").glob("drawn-s*")):
        chosen = drawn.with_name(drawn.name.replace("drawn", "longest-first"))
        rows = [read_rows(folder / "metrics.jsonl") for folder in (drawn, chosen)]
        seconds.append([a["time/generate_s"] / b["time/generate_s"] for a, b in zip(*rows, strict=True)])
        makespans.append([b.get("rollout/order_speedup", 1.0) for b in rows[1]])
        same &= recorded_steps(drawn) == recorded_steps(chosen)
    print(f"the same lengths in both arms: {'yes' if same else 'no'}\n")
    print("| steps | generation, s drawn / s longest first | by the lengths alone |\n|---|---|---|")
    for name, part in (("first", slice(0, 1)), ("later", slice(1, None))):
        cells = (
            [[ratio] for row in seconds for ratio in row[part]],
            [[ratio] for row in makespans for ratio in row[part]],
        )
        print(f"| {name} | {' | '.join(map(means, cells))} |")


def recorded_steps(folder: Path) -> list[Step]:
    """From the events of a run. Of a group that started over its last lengths count."""
    groups: dict[int, dict[int, tuple[str, list[int]]]] = defaultdict(dict)
    for row in read_rows(folder / "stream.jsonl"):
        if row["event"] == "finished" and "lengths" in row:
            groups[row["step"]][row["group"]] = row["prompt"], row["lengths"]
    return [dict(step[number] for number in sorted(step)) for _, step in sorted(groups.items())]


def learn(history: LengthHistory, step: Step, cap: int) -> None:
    for prompt, lengths in step.items():
        history.observe(prompt, lengths, [length >= cap for length in lengths])


def ratios(history: LengthHistory, step: Step, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Makespan in the order drawn over that with the longest first, for each number of engines and of their slots."""
    lengths = dict(enumerate(step.values()))
    expected = [history.expected(prompt) for prompt in step]
    chosen = sorted(lengths, key=lambda number: (-expected[number], number))
    return [order_speedup(lengths, chosen, *size) or 1.0 for size in sizes]


def quality(history: LengthHistory) -> list[float]:
    """Median absolute log error of the newest responses."""
    return [history.metrics()["rollout/length_error"]]


def between(groups: list[list[int]]) -> float:
    """Share of the log-variance that is between groups, by analysis of variance."""
    logs = [np.log(np.maximum(1, group)) for group in groups]
    within = float(np.mean([log.var(ddof=1) for log in logs]))
    own = float(np.var([log.mean() for log in logs], ddof=1)) - within / float(np.mean([*map(len, logs)]))
    return max(0.0, own) / (max(0.0, own) + within)


def head(columns: list[str]) -> None:
    names = [*columns, "length error"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))


def means(rows: list[list[float]]) -> str:
    """Mean and standard error of each column."""
    errors = np.std(rows, axis=0, ddof=1) / len(rows) ** 0.5 if len(rows) > 1 else np.zeros(len(rows[0]))
    return " | ".join(f"{mean:.2f} ± {error:.2f}" for mean, error in zip(np.mean(rows, axis=0), errors, strict=True))


if __name__ == "__main__":
    main()
