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
over those with the longest first, by step. The first step, before which nothing is known, has a line of its own.
"""

import argparse
import heapq
import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from cotrain.loop.ledger import LengthHistory
from cotrain.run.rows import read_rows

PROMPTS, SAMPLES, MEAN, CAP, SPREAD = 64, 8, 2000.0, 16_384, 0.9
ENGINES = ((1, 128), (2, 64), (4, 32), (4, 128))

NEWEST = 1024
"""Newest responses whose lengths are compared with the expected ones."""

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
    """The ratio for each of ENGINES, and the error of the expected lengths."""
    history, errors = LengthHistory(), deque[float](maxlen=NEWEST)
    *known, step = islice(epochs_of_lengths(share, seed), epochs + 1)
    for number, epoch in enumerate(known):
        errors += learn(history, epoch, CAP, epoch if number else {})
    found = ratios(history, step, ENGINES)
    errors += learn(history, step, CAP, step)
    return [*found, float(np.median(errors))]


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
    history, seen, found, errors = LengthHistory(), set[str](), [], deque[float](maxlen=NEWEST)
    for step in steps:
        slots = sum(map(len, step.values())) // 2
        if seen & step.keys():
            found.append(ratios(history, step, [(engines, max(1, slots // engines)) for engines in (1, 2, 4)]))
        errors += learn(history, step, cap, seen)
        seen |= step.keys()
    compared = f"{len(found)} of {len(steps)}"
    if not found:
        return f"{compared} | {'no prompt came twice' if steps else 'no lengths are recorded'}" + " |" * 5
    share = between([lengths for step in steps for lengths in step.values()])
    return f"{compared} | {share:.2f} | {means(found)} | {np.median(errors):.2f}"


def measured(study: Path) -> None:
    """Print a table of the seconds that two runs of each seed took for the same text."""
    seconds, same = list[list[float]](), True
    for drawn in sorted((study / "runs").glob("drawn-s*")):
        chosen = drawn.with_name(drawn.name.replace("drawn", "longest-first"))
        rows = [read_rows(folder / "metrics.jsonl") for folder in (drawn, chosen)]
        seconds.append([a["time/generate_s"] / b["time/generate_s"] for a, b in zip(*rows, strict=True)])
        same &= recorded_steps(drawn) == recorded_steps(chosen)
    print(f"the same lengths in both arms: {'yes' if same else 'no'}\n")
    print("| steps | generation, s drawn / s longest first |\n|---|---|")
    for name, part in (("first", slice(0, 1)), ("later", slice(1, None))):
        print(f"| {name} | {means([[ratio] for row in seconds for ratio in row[part]])} |")


def recorded_steps(folder: Path) -> list[Step]:
    """From the events of a run. Of a group that started over its last lengths count."""
    groups: dict[int, dict[int, tuple[str, list[int]]]] = defaultdict(dict)
    for row in read_rows(folder / "stream.jsonl"):
        if row["event"] == "finished" and "lengths" in row:
            groups[row["step"]][row["group"]] = row["prompt"], row["lengths"]
    return [dict(step[number] for number in sorted(step)) for _, step in sorted(groups.items())]


def learn(history: LengthHistory, step: Step, cap: int, seen: Iterable[str]) -> list[float]:
    """Learn a step. Returns how far the log lengths of prompts that were seen before were from the expected ones.

    A truncated response that was expected to be longer has error 0.
    """
    errors = []
    for prompt, lengths in step.items():
        if prompt in seen:
            found = np.log(np.maximum(1, lengths) / history.expected(prompt))
            errors += np.where(np.array(lengths) >= cap, np.maximum(0.0, found), abs(found)).tolist()
        history.observe(prompt, lengths, [length >= cap for length in lengths])
    return errors


def ratios(history: LengthHistory, step: Step, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Makespan in the order drawn over that with the longest first, for each number of engines and of their slots."""
    lengths = dict(enumerate(step.values()))
    expected = [history.expected(prompt) for prompt in step]
    chosen = sorted(lengths, key=lambda number: (-expected[number], number))
    drawn = list(step.values())
    ordered = [lengths[number] for number in chosen]
    fits = [sum(map(len, drawn)) <= engines * slots for engines, slots in sizes]
    return [1.0 if fit else makespan(drawn, *s) / makespan(ordered, *s) for fit, s in zip(fits, sizes, strict=True)]


def makespan(groups: Sequence[Sequence[int]], num_engines: int, slots: int) -> int:
    """Engine steps until the last request of these groups has ended. A group is the list of its response lengths [tokens].

    Each group goes to the engine with the fewest requests so far, and an engine runs its requests in order, `slots` at
    once. Every step takes the same time and emits one token for each request.
    """
    load, ends = Counter[int](), [[0] * slots for _ in range(num_engines)]
    for group in groups:
        engine = min(range(num_engines), key=load.__getitem__)
        load[engine] += len(group)
        for length in group:
            heapq.heappush(ends[engine], heapq.heappop(ends[engine]) + length)
    return max(map(max, ends))


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
