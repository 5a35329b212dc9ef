"""Host time that an engine step of an 8B policy sees of cotrain's hooks, without an engine.

    python -m benchmarks.host_time tap
    python -m benchmarks.host_time admission

Hidden size 4096, three aux layers and the final states, bfloat16, 3 draft tokens. The hidden states are on a GPU where there is one. Prints the
time that the hook takes from a step (wall clock, and processor seconds of the step's own thread), and the speed of features on their way into a shard.

`admission` prints how many requests an engine taps within 2 GiB, and which share of a step's rollouts a run taps. Response lengths are log-normal
(median an eighth of the limit, sigma 1), cut at the limit, and one request of each prompt is tapped; no time is measured.
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

from cotrain.config.load import load_config
from cotrain.engine.hooks import DraftingHook
from cotrain.engine.tap import as_bytes
from cotrain.engine.tap_admission import Admission, TapRequest, row_bytes
from cotrain.engine.worker import EngineWorker
from cotrain.records import Rollout, ScoredRollout, Versions
from cotrain.trainer.spec import tap_share

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
    hook.ring.beside(lambda: None).result()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def step_times(num_requests: int, num_tapped: int) -> tuple[float, float, float]:
    """Milliseconds of a step: wall clock and own processor time in the step, and processor time of the whole process."""
    step = Step(num_requests)
    hook, figures = hook_with(step, num_tapped, STEPS + PROMPT), []
    for position in range(PROMPT, PROMPT + STEPS):
        if not hook.tap.requests:
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


def shard_speed(folder: Path, tokens: int = 4096, num_rollouts: int = 4) -> tuple[float, float, float]:
    """GB of features a second from the tap into a shard, by wall clock and by processor time; best of five.

    Then the milliseconds that an engine step waits for it, median.
    """
    speeds, waits = [], []
    for turn in range(5):
        hook, ids = hook_with(Step(1), num_rollouts, tokens), torch.arange(PROMPT + tokens)
        hidden = torch.zeros(PROMPT + tokens, (LAYERS + 1) * HIDDEN, dtype=torch.bfloat16)
        for i in range(num_rollouts):
            hook.tap.record(f"r{i}", 0, ids.numpy(), [as_bytes(hidden)], hidden.dtype, 0)
        del hidden
        worker, path = EngineWorker(SimpleNamespace(rank=0)), folder / f"shard_{turn}"
        worker.hook = hook
        finished = {f"r{i}": (ids.tolist(), [-1.0] * tokens, PROMPT, 0, 0, 0) for i in range(num_rollouts)}
        law = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "draft_sample_method": "probabilistic"}
        start = np.array([time.perf_counter(), time.process_time()])
        worker.begin_features(finished, str(path), law, [2, 18, 33])
        waits.append(1e3 * (time.perf_counter() - start[0]))
        while (stats := worker.features_written(str(path))) is None:
            time.sleep(0.001)
        seconds = np.array([time.perf_counter(), time.process_time()]) - start
        assert stats["num_rollouts"] == num_rollouts
        speeds.append(stats["num_bytes"] / seconds / 1e9)
        path.unlink()
    wall, own = np.max(speeds, axis=0)
    return wall, own, statistics.median(waits)


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
        wall, own, waits = shard_speed(Path(folder))
    print(f"\nfeatures from the tap into a shard in /dev/shm: {wall:.2f} GB/s, {own:.2f} GB a second of CPU")
    print(f"a step waits {waits:.2f} ms for it")


POLICIES = {"8B": (4096, 3), "32B": (5120, 3), "70B": (8192, 3)}
"""Hidden size and aux layers."""

CONFIGS = {
    "configs/gpu8.toml": [],
    "configs/nodes4.toml": [],
    "configs/nodes4.toml, responses of up to 32k": ["rollout.max_new_tokens=32768", "policy.micro_batch_tokens=33280"],
    "configs/quickstart.toml": [],
}


def lengths_up_to(limit: int, number: int = 4096) -> list[int]:
    """Response lengths, the same in each call."""
    drawn = np.random.default_rng(0).lognormal(np.log(limit / 8), 1.0, number)
    return np.clip(drawn, 1, limit).astype(int).tolist()


def tapped_at_once(hidden: int, layers: int, limit: int, knows: bool) -> float:
    """Requests that an engine taps at once, mean of 20 draws. knows: whether it has seen lengths before."""
    counts = []
    for seed in range(20):
        admission = Admission(2 * 2**30, row_bytes((layers + 1) * hidden, 2), str(seed))
        earlier = {f"earlier {i}": length for i, length in enumerate(lengths_up_to(limit, 1024))}
        admission.choose({name: TapRequest(name, 1, 1) for name in earlier}, share=0.0)
        admission.observe(earlier if knows else {})
        counts.append(len(admission.choose({str(i): TapRequest(str(i), 512, limit) for i in range(256)})))
    return float(np.mean(counts))


def share_of(name: str, overrides: list[str]) -> float:
    """Share of a step's rollouts that a run taps from its second step on."""
    config = load_config([Path(name.split(",")[0])], overrides)
    versions, lengths = Versions(0, 0), lengths_up_to(config.rollout.max_new_tokens, config.rollout.rollouts_per_step)
    rollouts = [Rollout("", 0, [0] * 100, [0] * length, [], "", "stop", versions) for length in lengths]
    return tap_share(config, [ScoredRollout(rollout, 0.0, 0.0) for rollout in rollouts])


def admission() -> None:
    print("| policy | limit | lengths unknown | known |\n|--|--:|--:|--:|")
    for policy, (hidden, layers) in POLICIES.items():
        for limit in (2048, 8192, 32768):
            unknown, known = (tapped_at_once(hidden, layers, limit, knows) for knows in (False, True))
            print(f"| {policy} | {limit} | {unknown:.1f} | {known:.1f} |")
    print("\n| run | rollouts of a step | tapped |\n|--|--:|--:|")
    for name, overrides in CONFIGS.items():
        rollouts = load_config([Path(name.split(",")[0])], overrides).rollout.rollouts_per_step
        print(f"| {name} | {rollouts} | {100 * share_of(name, overrides):.0f} % |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("hook", choices=["tap", "admission"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    tap() if args.hook == "tap" else admission()


if __name__ == "__main__":
    main()
