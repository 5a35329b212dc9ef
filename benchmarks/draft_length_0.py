"""What a speculating engine costs when its draft length is 0: engines of vLLM 0.32 that take turns with the same prompts.

    python -m benchmarks.draft_length_0 [--model bundled:smollm2-135m-instruct] [--requests 16] [--rounds 8]

Prints, for each engine, its decoding speed over that of a stock engine, and the same for the processor time of its engine core in all
threads, which other programs on the machine disturb less. Ratios are those of a round, their geometric mean with its standard error;
the difference is the median of the rounds. With --threads 1 and tiny:llama, whose own arithmetic is small, the difference is
measured best, and it does not depend on the model. Each round is printed as it ends; Ctrl-C ends with the rounds that are whole.

stock: vLLM's own scheduler, no drafter. watched: the same with cotrain's scheduler, which records steps. fixed: an engine with an
EAGLE-3 drafter, two draft tokens at most, whose length is 0. for now: the same, but the length may rise in the middle of a request,
so the drafter's hidden states are put aside.
"""

import argparse
import asyncio
import os
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np

from cotrain.config.schema import RolloutConfig
from cotrain.engine import processes
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.process import threads
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutRequest
from cotrain.run.provenance import here_and_now
from drafters.base import ServingSpec

STOCK = "stock"
ARMS = (STOCK, "watched", "fixed", "for now")


class Arm:
    """One engine, and its engine core."""

    def __init__(
        self, name: str, rollout: RolloutConfig, model: Path, drafter: Path, serving: ServingSpec, scratch: Path
    ):
        of_drafter = (None, None) if name in (STOCK, "watched") else (str(drafter), serving)
        self.name = name
        self.engine = RolloutEngine(EngineSpec(rollout, str(model), *of_drafter, 0, str(scratch / name)))
        self.core = 0

    async def start(self) -> None:
        with patch.object(
            processes, "scheduler_for", vllms_scheduler if self.name == STOCK else processes.scheduler_for
        ):
            await self.engine.start()
        (core,) = self.engine._engine.engine_core.resources.engine_manager.processes
        self.core = core.pid
        await self.engine.set_num_speculative_tokens(0)
        if self.name == "for now":
            await self.engine.on_workers(EngineWorker.read_prompts, True)

    async def measure(self, requests: list[RolloutRequest]) -> np.ndarray:
        """Milliseconds of a decoding step, by the clock, and of the core's processor time with the step of the prompts."""
        started = processor_seconds(self.core)
        batch = await self.engine.generate(requests, tap=False)
        used, steps = processor_seconds(self.core) - started, len(batch.rollouts[0].token_ids)
        return 1e3 * np.array([self.engine.decode_seconds / (steps - 1), used / steps])


def vllms_scheduler(is_asynchronous: bool) -> str:
    assert not is_asynchronous
    return "vllm.v1.core.sched.scheduler.Scheduler"


def processor_seconds(process: int) -> float:
    """Processor time of all threads of a process."""
    return time.clock_gettime((~process << 3) | 2)  # what clock_getcpuclockid returns


async def compare(args: argparse.Namespace, scratch: Path, found: dict[str, list[np.ndarray]]) -> None:
    """Append the figures of `Arm.measure` to those of each arm, round by round."""
    import torch

    from cotrain.models.loading import resolve_model
    from drafters.base import TargetSpec
    from drafters.build import build_drafter
    from drafters.config import Eagle3Config

    model = resolve_model(args.model)
    target = TargetSpec.from_pretrained(model)
    drafter = build_drafter(Eagle3Config(type="eagle3", draft_vocab_size=min(4096, target.vocab_size)), target, seed=0)
    drafter.save(scratch / "drafter", torch.bfloat16)
    rollout = RolloutConfig(
        prompts_per_step=args.requests, samples_per_prompt=1, max_prompt_tokens=64, max_new_tokens=args.tokens, ignore_eos=True,
        num_speculative_tokens=2, synchronous_batches=True, dtype="bfloat16", vllm={"max_num_seqs": args.requests},
    )  # fmt: skip
    prompts = torch.randint(
        40, target.vocab_size, (args.requests, 40), generator=torch.Generator().manual_seed(0)
    ).tolist()
    requests = [RolloutRequest(f"p{i}", 0, prompt, None) for i, prompt in enumerate(prompts)]
    arms = [Arm(name, rollout, model, scratch / "drafter", drafter.serving, scratch) for name in args.arms]
    async with AsyncExitStack() as stack:
        for arm in arms:
            await arm.start()
            stack.push_async_callback(arm.engine.shutdown)
        for round_ in range(-1, args.rounds):  # the first warms up
            for arm in arms[round_ % len(arms) :] + arms[: round_ % len(arms)]:
                figures = await arm.measure(requests)
                if round_ >= 0:
                    found[arm.name].append(figures)
            ends = " ".join(f"{name} {rows[-1][0]:.1f} ms" for name, rows in found.items() if rows)
            print(f"round {round_ + 1} of {args.rounds} {ends}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=threads.num_cores())
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    args = parser.parse_args()
    os.environ.update(threads.engine_environment(args.threads))
    about, load = here_and_now(), os.getloadavg()[0]
    measured: dict[str, list[np.ndarray]] = {name: [] for name in args.arms}
    with scratch_folder("length-0") as scratch, suppress(KeyboardInterrupt):  # then with the rounds that are whole
        asyncio.run(compare(args, scratch, measured))
    whole = min(map(len, measured.values()))
    if whole < 2:
        sys.exit("two rounds are needed for an error")
    found = {name: np.array(rows[:whole]) for name, rows in measured.items()}
    threads_ = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(
        f"{args.model}, {args.requests} requests, {args.tokens} tokens, {whole} rounds; {about['machine']['cpu']}, "
        f"{threads_}, load {load:.1f} to {os.getloadavg()[0]:.1f}, {about['date']}\n"
    )
    print(table(found))


def table(found: dict[str, np.ndarray]) -> str:
    """Markdown."""
    lines = ["| engine | ms a step | speed over stock | CPU, ms a step | stock's CPU over this | CPU, ms above stock |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, rows in found.items():
        cells = []
        for column in range(2):
            logs = np.log(found[STOCK][:, column] / rows[:, column])
            error = logs.std(ddof=1) / len(logs) ** 0.5
            cells += [f"{np.median(rows[:, column]):.2f}", f"{np.exp(logs.mean()):.3f} ± {error:.3f}"]
        above = np.median(rows[:, 1] - found[STOCK][:, 1])
        lines.append(f"| {name} | {' | '.join(cells)} | {above:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
