"""History and a drafter together against either alone: the cells of a `cotrain bench`, by requests at once and epoch.

    python -m benchmarks.both_together FOLDER...

The folders hold a bench.json each, of rounds over the same prompts (docs/measurements/history.md has the command); the last arm is that of both.
Prints a Markdown table: decoding speed over no speculation in the same batch, geometric mean over batches and its standard error, of
each arm, and of both over the better one alone. A second table has what a step drafts and how long it takes, by requests at once and epoch.
"""

import argparse
import json
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of cotrain bench")
    turns = [t for f in parser.parse_args().folders for t in json.loads((f / "bench.json").read_text())["turns"]]
    plain, *arms = dict.fromkeys(turn["arm"] for turn in turns)
    rounds = sorted({turn["round"] for turn in turns})
    print(
        "| requests at once | epoch | " + " | ".join(arms) + " | both / better |\n|---|---|" + "---|" * (len(arms) + 1)
    )
    for batch in sorted({turn["batch"] for turn in turns}):
        for name, wanted in ((1, rounds[:1]), (rounds[-1] + 1, rounds[-1:]), ("all", rounds)):
            of = [t for t in turns if t["batch"] == batch and t["round"] in wanted]
            logs = {a: np.log([speed(t) for t in of if t["arm"] == a]) for a in (plain, *arms)}
            gains = {arm: logs[arm] - logs[plain] for arm in arms}
            best = max(arms[:-1], key=lambda arm: gains[arm].mean())
            cells = [*gains.values(), gains[arms[-1]] - gains[best]]
            print(f"| {batch} | {name} | {' | '.join(map(mean, cells))} |")
    print(
        "\n| requests at once | epoch | arm | draft tokens a request and step | step / step without drafts |\n|---|---|---|---|---|"
    )
    for batch, epoch, arm in dict.fromkeys((t["batch"], t["round"], t["arm"]) for t in turns if t["by_proposer"]):
        of = [t for t in turns if (t["batch"], t["round"]) == (batch, epoch)]
        print(
            f"| {batch} | {epoch + 1} | {arm} | {step_of(*([t for t in of if t['arm'] == a] for a in (arm, plain)))} |"
        )


def speed(turn: dict) -> float:
    return turn["timed_tokens"] / turn["seconds"]


def step_of(turns: list[dict], without: list[dict]) -> str:
    """Every step of a request emits a token and those of its drafts that were accepted. without: the same without drafts."""
    drafted, accepted = (
        sum(count for t in turns for name, count in t["by_proposer"].items() if name.endswith(f"/{kind}_tokens"))
        for kind in ("drafted", "accepted")
    )
    num_tokens = sum(turn["num_tokens"] for turn in turns)
    faster = np.exp(np.mean([np.log(speed(turn) / speed(plain)) for turn, plain in zip(turns, without, strict=True)]))
    return f"{drafted / (num_tokens - accepted):.2f} | {num_tokens / (num_tokens - accepted) / faster:.2f}"


def mean(logs: np.ndarray) -> str:
    value = np.exp(logs.mean())
    return f"{value:.2f} ± {value * logs.std(ddof=1) / len(logs) ** 0.5:.2f}"


if __name__ == "__main__":
    main()
