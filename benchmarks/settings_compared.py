"""Runs of the same steps with other settings: tokens a second of generation, and of whole steps, over those of the first run.

python -m benchmarks.settings_compared runs/quickstart runs/k1 runs/seqs16
"""

import argparse
from pathlib import Path

from pipelines.page.record import read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, the first of them the base")
    found = {run.name: speeds(run) for run in parser.parse_args().runs}
    base = next(iter(found.values()))
    print("| run | generation | whole step |\n|---|--:|--:|")
    for name, speed in found.items():
        print(f"| {name} | {speed[0] / base[0]:.2f} | {speed[1] / base[1]:.2f} |")


def speeds(run: Path) -> tuple[float, float]:
    """Tokens a second of generation and of whole steps."""
    rows = read_run(run).metrics
    tokens = rows["rollout/generated_tokens"].sum()
    return tokens / rows["time/generate_s"].sum(), tokens / rows["time/step_s"].sum()


if __name__ == "__main__":
    main()
