"""Kill a run with `kill -9` at every kind of event of its stream, and resume it each time.

    python -m benchmarks.kill_at_events [--lag 1] [--root DIR]

One run of the smoke configuration, with generation ahead of learning, is killed once for each kind of event, as soon as the
event is in stream.jsonl. In the end every group must have been trained on once, in order, and no token older than the lag.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = (
    "admitted", "dispatched", "finished", "scored", "taken", "released", "policy updated", "policy swapped",
    "drafter swapped", "drafter trained",
)  # fmt: skip
STEPS_BETWEEN = 3
"""Steps from one kill to the next, so that each run has got on from its checkpoint."""


def rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--root", type=Path, default=None)
    args = parser.parse_args()
    root = args.root or Path(tempfile.mkdtemp(prefix="kill-"))
    run, steps = root / "killed", STEPS_BETWEEN * (len(KINDS) + 1)
    command = [sys.executable, "-m", "pipelines.cli", "train"]
    first = ["configs/smoke.toml", "rollout.synchronous_batches=false", "name=killed", f"steps={steps}"]
    first += [f"stream.max_policy_lag={args.lag}", "checkpoint.every=2", f"run_root={root}"]
    resume = ["--resume", "killed", f"run_root={root}"]
    for number, kind in enumerate(KINDS):
        process = subprocess.Popen(
            command + (resume if number else first), start_new_session=True, stdout=subprocess.DEVNULL
        )
        least = STEPS_BETWEEN * (number + 1)
        while not any(row["event"] == kind and row["step"] >= least for row in rows(run / "stream.jsonl")):
            if process.poll() is not None:
                raise SystemExit(f"the run ended before {kind}")
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done = len(rows(run / "metrics.jsonl"))
        print(f"killed at {kind!r} of step {least} or later, after {done} steps", flush=True)
    subprocess.run(command + resume, check=True, stdout=subprocess.DEVNULL)
    metrics, events = rows(run / "metrics.jsonl"), rows(run / "stream.jsonl")
    trained = [row["group"] for row in events if row["event"] == "taken"]
    restored = sum(row["event"] == "restored" for row in events)
    oldest = max(row["stream/lag_max"] for row in metrics)
    sound = trained == list(range(4 * steps)) and oldest <= args.lag and len(metrics) == steps
    print(f"{len(KINDS)} kills: {len(trained)} groups trained on, {len(set(trained))} of them different, of {4 * steps}; "
          f"{restored} came out of checkpoints; largest lag {oldest:.0f}: {'sound' if sound else 'NOT SOUND'}")  # fmt: skip
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
