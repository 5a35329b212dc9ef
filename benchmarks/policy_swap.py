"""Time of one policy update by stage: the learner's state is written, checked, loaded and read back.

    python -m benchmarks.policy_swap [--model bundled:smollm2-135m-instruct] [--dtype float32] [--rounds 7] [--engine] [--not-ahead]

The stages run in this process on vLLM's model, as its worker runs them. The file is checked ahead, as in a run while the drafter
trains, so that the update itself begins with loading. With --engine, updates of a real engine are
timed as well: they include the pause, the messages between processes and the reset of the prefix cache.
"""

import argparse
import asyncio
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cotrain.process import threads

Times = tuple[float, float]
"""Seconds by the clock, and of this process on all cores, which other processes disturb less."""

STAGES = {"read and check": "read_payload", "load": "reload_weights", "read back": "differing_tensors"}


def learner_state(model: Path) -> dict[str, Any]:
    """The weights as the policy learner holds them: float32, without tied duplicates."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    tied = set(policy.all_tied_weights_keys)
    return {name: tensor for name, tensor in policy.state_dict().items() if name not in tied}


def measure_stages(model: Path, scratch: Path, dtype: str, rounds: int, ahead: bool) -> list[dict[str, Times]]:
    """Times of every stage, a row a round."""
    import torch

    from cotrain.engine import loading as vllm_weights
    from cotrain.engine import served as served_weights
    from cotrain.weights.payload import write_payload

    state, (served, config) = learner_state(model), served_model(model, scratch, dtype)
    weights = served_weights.ServedWeights(served, config.model_config, scratch / "kept" / "target")
    row: dict[str, Times] = {}
    for stage, function in STAGES.items():
        owner = served_weights if function in vars(served_weights) else vllm_weights
        setattr(owner, function, timed(getattr(owner, function), stage, row))
    rows = []
    for version in range(rounds):
        row.clear()
        move(state)
        payload = timed(write_payload, "write", row)(state, scratch / "sent.safetensors", getattr(torch, dtype))
        if ahead:
            timed(weights.check, "checked ahead", row)(payload.path, payload.digests)
        timed(weights.update, "all of the update", row)(payload.path, payload.digests, version)
        rows.append(dict(row))
    return rows


def served_model(model: Path, scratch: Path, dtype: str) -> tuple[Any, Any]:
    """vLLM's model and configuration, loaded the way its worker does."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
    arguments = EngineArgs(model=str(model), dtype=dtype, max_model_len=512, enforce_eager=True)
    config = arguments.create_engine_config()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def move(state: dict[str, Any]) -> None:
    """What a training step does: every weight changes."""
    for tensor in state.values():
        tensor.mul_(1.001)


def timed(function: Callable[..., Any], stage: str, row: dict[str, Times]) -> Callable[..., Any]:
    """The function, with its times added to the row under the stage's name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started, cpu_started = time.perf_counter(), time.process_time()
        result = function(*args, **kwargs)
        row[stage] = (time.perf_counter() - started, time.process_time() - cpu_started)
        return result

    return call


async def measure_engine(model: Path, scratch: Path, dtype: str, rounds: int, ahead: bool) -> list[dict[str, Times]]:
    """Times of writing and of RolloutEngine.update_policy, and what the engine needs to start."""
    import torch

    from cotrain.config.schema import RolloutConfig
    from cotrain.engine.arguments import EngineSpec
    from cotrain.engine.engine import RolloutEngine
    from cotrain.weights.payload import write_payload

    state, row = learner_state(model), {}
    engine = RolloutEngine(
        EngineSpec(RolloutConfig(max_prompt_tokens=64, dtype=dtype), str(model), None, None, 0, str(scratch))
    )
    started = time.perf_counter()
    await engine.start()
    print(f"the engine started in {time.perf_counter() - started:.1f} s")
    rows = []
    try:
        for version in range(1, rounds + 1):
            row.clear()
            move(state)
            payload = timed(write_payload, "write", row)(state, scratch / "sent.safetensors", getattr(torch, dtype))
            if ahead:
                await engine.check_policy(payload)
            row["update of the engine"] = ((await engine.update_policy(payload, version)).seconds, math.nan)
            rows.append(dict(row))
    finally:
        await engine.shutdown()
    return rows


def report(rows: list[dict[str, Times]]) -> None:
    """Median and smallest times of each stage."""
    print(f"{'seconds':22s}{'by the clock: median':>22s}{'least':>8s}{'of the CPU: median':>22s}{'least':>8s}")
    for stage in rows[0]:
        clock, cpu = zip(*(row[stage] for row in rows), strict=True)
        figures = (statistics.median(clock), min(clock), statistics.median(cpu), min(cpu))
        print("{:22s}{:22.3f}{:8.3f}{:22.3f}{:8.3f}".format(stage, *figures))


@contextmanager
def shared_memory() -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix="cotrain-swap-", dir="/dev/shm"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


def main() -> None:
    from cotrain.models.loading import resolve_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument(
        "--not-ahead", action="store_true", help="check within the update, as for engines on other nodes"
    )
    args = parser.parse_args()
    model = resolve_model(args.model)
    with shared_memory() as scratch:
        if args.engine:
            report(asyncio.run(measure_engine(model, scratch, args.dtype, args.rounds, not args.not_ahead)))
        else:
            report(measure_stages(model, scratch, args.dtype, args.rounds, not args.not_ahead))


if __name__ == "__main__":
    environment = threads.engine_environment(threads.num_cores())
    if os.environ.get("LD_PRELOAD") != environment.get("LD_PRELOAD"):  # the OpenMP runtime is chosen at process start
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    main()
