"""The same run with generation 0, 1 and 2 steps ahead of learning: reward, lag, KL, waiting and acceptance.

    python -m benchmarks.policy_lag [--steps 30] [--lags 0 1 2] [--seeds 0 1] [key=value ...]

On cores that all roles share, overlap saves no time, and none is claimed. What a step would take if engines and learner had
devices of their own is computed from the run without lag: the longer one of generation and learning, and the swap.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import pandas as pd

from cotrain.run.rows import read_rows
from pipelines.page.record import read_run

CONFIG = "configs/async.toml"


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--root", type=Path, default=Path("runs/policy_lag"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        for lag in args.lags:
            name = f"lag{lag}-s{seed}"
            if not (args.root / name / "report").exists():
                own = [f"name={name}", f"steps={args.steps}", f"seed={seed}", f"run_root={args.root}"]
                command = [sys.executable, "-m", "pipelines.cli", "train", CONFIG, f"stream.max_policy_lag={lag}"]
                subprocess.run([*command, *own, *args.overrides], check=True)
            rows.append({"lag": lag, "seed": seed} | summary(args.root / name))
            print(pd.DataFrame(rows).to_markdown(index=False, floatfmt=".3f"), flush=True)


def summary(folder: Path) -> dict[str, float]:
    """One row of the table; "last" is the mean of the last third."""
    run = read_run(folder)
    third = max(1, len(run.metrics) // 3)

    def mean(metric: str, steps: slice = slice(None)) -> float:
        return float(run.column(metric).iloc[steps].mean())

    first, last = slice(third), slice(-third, None)
    events = read_rows(folder / "stream.jsonl")
    trained = [row["group"] for row in events if row["event"] == "taken"]
    assert trained == sorted(set(trained)), "a group was trained on twice or out of order"
    found = {
        "reward first": mean("policy/reward", first),
        "reward last": mean("policy/reward", last),
        "lag mean": mean("stream/lag_mean"),
        "lag max": float(run.column("stream/lag_max").max()),
        "segments": mean("stream/segments_per_rollout"),
        "KL at lag 0": mean("policy/behaviour_kl_lag_0"),
        "KL at largest lag": mean(f"policy/behaviour_kl_lag_{int(run.column('stream/lag_max').max())}"),
        "waited share": mean("time/wait_for_rollouts_s") / mean("time/step_s"),
        "acceptance first": mean("rollout/acceptance_length", first),
        "acceptance last": mean("rollout/acceptance_length", last),
        "draft tokens last": mean("rollout/drafted_tokens", last) / max(1, mean("rollout/num_drafts", last)),
        "expected at K last": mean("rollout/expected_acceptance_length_longest", last),
        "step s": mean("time/step_s"),
    }
    if "time/generate_s" in run.metrics:
        generate, learn, swap = (mean(f"time/{part}_s") for part in ("generate", "learn", "swap_policy"))
        found["apart s"] = max(generate, learn) + swap
    return found


if __name__ == "__main__":
    main()
