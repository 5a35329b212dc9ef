"""Stands in for `cotrain train`: writes what they write, in no time. FAIL=NAME lets a run fail.

Reads the configuration with the standard library alone, since it starts dozens of times.
"""

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

from cotrain.run.checkpoint import SCHEMA


def main() -> int:
    command, file, *resume = sys.argv[1:]
    config = tomllib.loads(Path(file).read_text())
    name = config["name"]
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(" ".join([command, name, *resume]) + "\n")
    folder = Path(config["run_root"]) / name
    folder.mkdir(exist_ok=bool(resume))
    (folder / "run.lock").touch()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "experiment").write_text(os.environ["MLFLOW_EXPERIMENT_NAME"])
    if os.environ.get("FAIL") == name:
        print("step 1/4\nTraceback (most recent call last):\nRuntimeError: the engine died")
        return 1
    return train(config, folder)


def train(config: dict, folder: Path) -> int:
    """Until the last step, or one step and a checkpoint when SLOW=NAME and SIGINT ends it, or SIGNALS of them."""
    left = int(os.environ.get("SIGNALS", "1"))

    def stop(*_: object) -> None:
        nonlocal left
        left -= 1

    signal.signal(signal.SIGINT, stop)
    (folder / "checkpoints").mkdir(exist_ok=True)
    metrics = folder / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    for step in range(done + 1, config["steps"] + 1):
        row = {"step": step, "policy/reward": 0.5, "rollout/tokens_per_s": 10.0, "time/step_s": 1.0}
        if "drafter" in config:
            row |= {"rollout/acceptance_length": 1.0 + step / 10, "versions/drafter": step, "rollout/num_drafts": 5}
        with metrics.open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        print(f"step {step}/{config['steps']}", flush=True)
        while os.environ.get("SLOW") == config["name"] and left > 0:
            time.sleep(0.01)
        if left <= 0:
            checkpoint = folder / "checkpoints" / f"step_{step:06d}"
            checkpoint.mkdir()
            (checkpoint / "COMPLETE").write_text(json.dumps({"schema": SCHEMA, "files": {}}))
            return 0
    (folder / "drafter").mkdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
