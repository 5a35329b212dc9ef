"""What adapters save in the learner: python -m benchmarks.adapters [--rounds 3]

SmolLM2-135M-Instruct in float32, updates of 16 rollouts of random tokens (64 of a prompt, 32 of a response) with the KL penalty to the
first policy. Each arm is a process of its own, and arms take turns: all weights, and adapters of rank 16 on every linear layer. Prints
medians of the seconds of an update and of writing the engines' file, the file's size, that of a checkpoint, and the memory that the
process held at most beyond what it held before the model was loaded.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS: dict[str, Any] = {"all weights": None, "adapters": {"rank": 16, "alpha": 32.0}}
ROLLOUTS, PROMPT, RESPONSE, UPDATES = 16, 64, 32, 3
MIB = 2**20


def memory_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def measure(lora: Any, threads: int) -> dict[str, float]:
    """Make updates in this process, and measure them without the first."""
    import torch

    torch.set_num_threads(threads)

    from cotrain.config.schema import PolicyConfig, RolloutConfig
    from cotrain.models.loading import BUNDLED_MODEL, resolve_model
    from cotrain.policy.learner import PolicyLearner
    from cotrain.records import Rollout, ScoredRollout, Versions

    policy = PolicyConfig.model_validate(
        {"model": BUNDLED_MODEL, "micro_batch_tokens": 1024, "kl_coefficient": 0.05, "lora": lora}
    )
    rollout, rng = RolloutConfig(max_new_tokens=RESPONSE, dtype="float32"), random.Random(0)
    rollouts = []
    for number in range(ROLLOUTS):
        prompt, response = (rng.sample(range(1000, 40_000), length) for length in (PROMPT, RESPONSE))
        one = Rollout(f"p{number}", 0, prompt, response, [-10.0] * RESPONSE, "", "stop", Versions(0, 0))
        rollouts.append(ScoredRollout(one, 0.0, rng.gauss(0, 1)))
    before = memory_mib("VmRSS")
    learner = PolicyLearner(policy, rollout, str(resolve_model(BUNDLED_MODEL)), 1000)
    seconds: dict[str, list[float]] = {"update": [], "file": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for _ in range(1 + UPDATES):
            started = time.perf_counter()
            learner.update(rollouts)
            seconds["update"].append(time.perf_counter() - started)
            started = time.perf_counter()
            payload = learner.write_payload(Path(folder) / "policy.safetensors")
            seconds["file"].append(time.perf_counter() - started)
        held = memory_mib("VmHWM") - before
        learner.save(Path(folder) / "saved")
        saved = sum(path.stat().st_size for path in (Path(folder) / "saved").rglob("*") if path.is_file())
    assert payload is not None
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return medians | {"sent": payload.num_bytes / MIB, "saved": saved / MIB, "held": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each arm (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm is not None:
        print(json.dumps(measure(ARMS[options.arm], options.threads)))
        return
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm in ARMS:
            own = [sys.executable, "-m", "benchmarks.adapters", "--threads", str(options.threads), "--arm", arm]
            done = subprocess.run(own, capture_output=True, text=True, check=True)
            found[arm].append(json.loads(done.stdout.splitlines()[-1]))
    print("| trains | update, s | file for the engines, s | MiB sent | MiB of a checkpoint | MiB held |")
    print("|---|--:|--:|--:|--:|--:|")
    for arm, rows in found.items():
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        cells = f"{middle['update']:.1f} | {middle['file']:.2f} | {middle['sent']:.0f} | {middle['saved']:.0f} | {middle['held']:.0f}"
        print(f"| {arm} | {cells} |")


if __name__ == "__main__":
    main()
