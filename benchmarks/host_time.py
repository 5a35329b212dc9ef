"""Host time that an engine step of an 8B policy sees of cotrain's hooks, without an engine.

    python -m benchmarks.host_time tap

Hidden size 4096, three aux layers and the final states, bfloat16, 3 draft tokens. The hidden states are on a GPU where there is one. Prints the
time that the hook takes from a step (wall clock, and processor seconds of the step's own thread), and the speed of features on their way into a shard.
"""

import argparse
import datetime
import platform
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrain.engine.hooks import DraftingHook
from cotrain.engine.tap import as_bytes
from cotrain.engine.tap_admission import TapRequest
from cotrain.transport.features import write_records
from drafters.base import SamplingParams

HIDDEN, LAYERS, K, STEPS, PROMPT = 4096, 3, 3, 20, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Step:
    """What the hook reads of vLLM's runner and of a decoding step in which every request verifies K draft tokens."""

    def __init__(self, num_requests: int):
        self.rows = num_requests * (K + 1)
        self.hidden = [torch.randn(self.rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS + 1)]
        self.starts = torch.arange(0, self.rows + 1, K + 1, dtype=torch.int32)
        self.first = torch.arange(K + 1, device=DEVICE).repeat(num_requests)
        self.runner: Any = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=[f"r{i}-0a1b2c3d" for i in range(num_requests)]),
            input_ids=SimpleNamespace(gpu=torch.arange(self.rows, dtype=torch.int32, device=DEVICE)),
            model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN),
            propose_draft_token_ids=None,
            device=torch.device(DEVICE),
        )

    def move_to(self, position: int) -> None:
        """Let every request be at this position in the next step."""
        positions = self.first + position
        self.runner._get_positions = lambda num: positions[:num]

    def record(self, hook: DraftingHook) -> None:
        """What the hook does in one step."""
        hook.record(self.hidden, SimpleNamespace(query_start_loc_cpu=self.starts))


def hook_with(step: Step, num_tapped: int, max_new_tokens: int) -> DraftingHook:
    hook = DraftingHook(step.runner)
    hook.tap.start({f"r{i}": TapRequest(f"p{i}", PROMPT, max_new_tokens) for i in range(num_tapped)})
    return hook


def settle(hook: DraftingHook) -> None:
    """Wait for what the hook does beside the steps."""
    hook.settle()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def step_times(num_requests: int, num_tapped: int) -> tuple[float, float, float]:
    """Milliseconds of a step: wall clock and own processor time in the step, and processor time of the whole process."""
    step = Step(num_requests)
    hook, figures = hook_with(step, num_tapped, STEPS + PROMPT), []
    for position in range(PROMPT, PROMPT + STEPS):
        if not hook.tap.is_recording:
            return 0.0, 0.0, 0.0
        step.move_to(position)
        start = np.array([time.perf_counter(), time.thread_time(), time.process_time()])
        step.record(hook)
        seen = np.array([time.perf_counter(), time.thread_time(), 0.0])
        settle(hook)
        seen[2] = time.process_time()
        figures.append(seen - start)
    wall, own, whole = (1e3 * statistics.median(column) for column in np.array(figures[2:]).T)
    return wall, own, whole


def shard_speed(folder: Path, tokens: int = 4096, num_rollouts: int = 4) -> tuple[float, float]:
    """GB of features a second from the tap into a shard, by wall clock and by processor time; best of three."""
    best = np.zeros(2)
    for _ in range(3):
        step = Step(1)
        hook = hook_with(step, num_rollouts, tokens)
        records: dict[str, Tensor] = {}
        for i in range(num_rollouts):
            records[f"r{i}"] = torch.arange(PROMPT + tokens)
            hidden = torch.zeros(PROMPT + tokens, (LAYERS + 1) * HIDDEN, dtype=torch.bfloat16)
            hook.tap.record(f"r{i}", 0, records[f"r{i}"].numpy(), [as_bytes(hidden)], hidden.dtype, 0)
        del hidden
        start = np.array([time.perf_counter(), time.process_time()])
        law = SamplingParams(1.0, 1.0, 0, "probabilistic")
        taken = [hook.take(name, ids.tolist(), PROMPT, 0, law, (2, 18, 33)) for name, ids in records.items()]
        kept = [record for record in taken if record is not None]
        write_records(folder / "shard", kept)
        seconds = np.array([time.perf_counter(), time.process_time()]) - start
        best = np.maximum(best, sum(record.num_bytes for record in kept) / seconds / 1e9)
    return best[0], best[1]


def tap() -> None:
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine()
    print(
        f"{datetime.date.today()}, {name}, torch {torch.__version__}; hidden {HIDDEN}, {LAYERS} aux layers, k = {K}\n"
    )
    print("| requests | tapped | ms of a step, wall | ms of a step, own CPU | ms of CPU in all threads |")
    print("|--:|--:|--:|--:|--:|")
    for num_requests in (16, 64, 256):
        for num_tapped in (num_requests, 2, 0):
            wall, own, whole = step_times(num_requests, num_tapped)
            print(f"| {num_requests} | {num_tapped} | {wall:.2f} | {own:.2f} | {whole:.2f} |", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        wall, own = shard_speed(Path(folder))
    print(f"\nfeatures from the tap into a shard in /dev/shm: {wall:.2f} GB/s, {own:.2f} GB a second of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("hook", choices=["tap"])
    parser.parse_args()
    torch.set_num_threads(1)
    tap()


if __name__ == "__main__":
    main()
