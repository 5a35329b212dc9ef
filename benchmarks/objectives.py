"""Drafters trained for different objectives from the same rollouts with the same updates, each served by the engine.

    cotrain init configs/in_domain.toml                      # the rollouts, once
    python benchmarks/objectives.py runs/in-domain [--seeds 0 1] [--arms NAME ...]

Each arm is a `cotrain init` named objectives-TOKENSxEPOCHS-ARM-SEED; those that are complete are not run again. Prints a
Markdown table. "length" is the acceptance length.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

ARMS = {
    "soft_cross_entropy, decay": ("drafter.objective.type=soft_cross_entropy", "drafter.objective.depth_weights=decay"),
    "lk_hybrid, decay": ("drafter.objective.type=lk_hybrid", "drafter.objective.depth_weights=decay"),
    "lk_hybrid, reach": ("drafter.objective.type=lk_hybrid", "drafter.objective.depth_weights=reach"),
    "soft_cross_entropy, reach": ("drafter.objective.type=soft_cross_entropy", "drafter.objective.depth_weights=reach"),
    "lk_hybrid, reach, greedy drafts": ("drafter.objective.type=lk_hybrid", "rollout.draft_sample_method=greedy"),
}
"""Overrides of each arm."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", help="run folder of a `cotrain init` of the same policy")
    parser.add_argument("--config", default="configs/in_domain.toml", help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=60_000, help="response tokens (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over them (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="default 0 1")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    args = parser.parse_args()

    failed = []
    for seed in args.seeds:
        for arm in args.arms:
            name = run_name(arm, seed, args)
            if not (Path("runs") / name / "init.json").exists() and not train(name, arm, seed, args):
                failed.append(name)
    print(table(args))
    for name in failed:
        print(f"failed: {name}, see the output above", file=sys.stderr)
    return 1 if failed else 0


def run_name(arm: str, seed: int, args: argparse.Namespace) -> str:
    return f"objectives-{args.tokens}x{args.epochs}-{arm.replace(', ', '-').replace(' ', '-')}-{seed}"


def train(name: str, arm: str, seed: int, args: argparse.Namespace) -> bool:
    """Run one arm; False when it failed."""
    print(f"== {name}", flush=True)
    command = ["cotrain", "init", args.config, f"name={name}", f"seed={seed}", *ARMS[arm]]
    command += ["init.source.type=rollouts", f"init.source.path={args.rollouts}", f"init.tokens={args.tokens}"]
    command += [f"init.epochs={args.epochs}", "tracking.log_drafters=false"]
    return subprocess.run(command).returncode == 0


def table(args: argparse.Namespace) -> str:
    """Markdown, one row for each arm, means over its finished seeds."""
    lines = [
        "| objective | seeds | steps | expected length | served length | served by seed | served positions 1, 2, 3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in args.arms:
        files = [Path("runs") / run_name(arm, seed, args) / "init.json" for seed in args.seeds]
        runs = [json.loads(file.read_text()) for file in files if file.exists()]
        if not runs:
            continue
        served = [run["served"]["acceptance_length"] for run in runs]
        rates = zip(*(run["served"]["acceptance_rates"] for run in runs), strict=True)
        cells = [
            arm,
            str(len(runs)),
            str(runs[0]["steps"]),
            f"{mean(run['expected_acceptance_length'] for run in runs):.3f}",
            f"{mean(served):.3f}",
            ", ".join(f"{length:.3f}" for length in served),
            ", ".join(f"{mean(rate):.3f}" for rate in rates),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
