"""What gate and lossless monitor cost a run: shares of its step time, from its metrics.

    cotrain train CONFIG name=NAME
    python benchmarks/trust_cost.py runs/NAME [--skip 1]

gate: CPU seconds in which the drafter trainer scores both drafters, over those of all cores: the policy learns beside it,
and the run loses what it is kept from. (On a GPU of its own the trainer costs nothing.) "gate, waiting": the seconds it
takes, which would be lost if nothing ran beside it. monitor: seconds of its checks. Prints a Markdown table.
"""

import argparse
import json
import sys
from pathlib import Path

COLUMNS = ("gate", "monitor", "together", "gate, waiting")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="run folders")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first steps (default %(default)s)")
    args = parser.parse_args()
    print(f"| run | steps | mean step, s | {' | '.join(COLUMNS)} |")
    print("|---|---|---|" + "---|" * len(COLUMNS))
    for run in args.run:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        cores = json.loads((run / "provenance.json").read_text())["attempts"][-1]["machine"]["cores"]
        print(table_row(run.name, [row for row in rows if row["step"] > args.skip], cores))
    return 0


def table_row(name: str, rows: list[dict[str, float]], cores: int) -> str:
    seconds = sum(row["time/step_s"] for row in rows)
    spent = {
        "gate": sum(row.get("drafter/score_cpu_s") or 0.0 for row in rows) / cores,
        "monitor": sum(row.get("time/lossless_s") or 0.0 for row in rows),
    }
    spent["together"] = sum(spent.values())
    spent["gate, waiting"] = sum(row.get("drafter/score_s") or 0.0 for row in rows)
    shares = " | ".join(f"{spent[column] / seconds:.2%}" for column in COLUMNS)
    return f"| {name} | {len(rows)} | {seconds / len(rows):.1f} | {shares} |"


if __name__ == "__main__":
    sys.exit(main())
