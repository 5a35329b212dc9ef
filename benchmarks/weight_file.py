"""Time of a policy update's file, by stage: written, checked, and copied as an engine loads it.

    python -m benchmarks.weight_file [--layers 30] [--hidden 576] [--vocabulary 49152] [--dtype float32] [--rounds 5]

The shapes are by default those of SmolLM2-135M, in the quickstart's number format. benchmarks/policy_swap.py times the engine's part,
with vLLM's own loading, and the read-back.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cotrain.weights.payload import digest, read_payload, write_tensors


def weights(layers: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random matrices with the shapes of a small Llama with a tied head."""
    wide, third = hidden * 8 // 3, hidden // 3
    shapes = {"q": (hidden, hidden), "k": (third, hidden), "v": (third, hidden), "o": (hidden, hidden)}
    shapes |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    state = {f"layers.{i}.{name}": torch.randn(shape) for i in range(layers) for name, shape in shapes.items()}
    return {name: t.to(dtype) for name, t in ({"embed_tokens": torch.randn(vocabulary, hidden)} | state).items()}


def timed(stage: str, rounds: int, call: Callable[[], Any]) -> Any:
    """Print the least seconds of a call, by the clock and of a core, and return its last result."""
    taken = []
    for _ in range(rounds):
        began, cpu = time.perf_counter(), time.process_time()
        result = call()
        taken.append((time.perf_counter() - began, time.process_time() - cpu))
    print(f"{stage:44} {min(wall for wall, _ in taken):6.3f} s, {min(cpu for _, cpu in taken):6.3f} s of a core")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 30), ("hidden", 576), ("vocabulary", 49152), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    state = weights(args.layers, args.hidden, args.vocabulary, getattr(torch, args.dtype))
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    print(f"{date.today()}  {platform.node()}, {os.cpu_count()} cores, torch {torch.__version__}; {size:.0f} MB")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "policy.safetensors"
        write = lambda: write_tensors(layout, state.items(), path)
        payload = timed("write and hash, beside the drafter's training", args.rounds, write)
        check = lambda: read_payload(str(path), payload.digests, layout)
        read = timed("map, hash again, look for NaN", args.rounds, check)
        timed("  of it: map", args.rounds, lambda: load_file(path))
        timed("  of it: hash", args.rounds, lambda: [digest(tensor) for tensor in read.values()])
        timed("  of it: NaN and infinity", args.rounds, lambda: [tensor.aminmax() for tensor in read.values()])
        timed("copy all, as an engine that loads it", args.rounds, lambda: [tensor.clone() for tensor in read.values()])


if __name__ == "__main__":
    main()
