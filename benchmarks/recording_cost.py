"""What a run pays for steps.jsonl: the scheduler's notes on each engine step, and the counts by depth of each rollout.

    python -m benchmarks.recording_cost [--model bundled:smollm2-135m-instruct] [--batch 1 4 16] [--rounds 4]

Prints, as shares of the time in which a real engine generates, with an untrained EAGLE-3 drafter (k = 3) and without one: all that
cotrain's scheduler does in a step, most of which an engine that speculates needs anyway, and the counts by depth. Shares are of time
inside the engine, so that a machine that is not quiet changes them little.
"""

import argparse
import asyncio
import functools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cotrain.rollout.engine as rollout_engine
from cotrain.config.schema import RolloutConfig
from cotrain.process import threads
from cotrain.records import RolloutRequest
from cotrain.rollout.acceptance_stats import counts_by_depth
from cotrain.rollout.speculation.controller import SpeculationController
from cotrain.rollout.vllm import scheduling

K = 3
SCHEDULER = ["draft_lengths", "prices", "observe", "idle"]
SECONDS: Counter[str] = Counter()


def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same call, its seconds added up under a name."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            SECONDS[name] += time.perf_counter() - started

    return wrapped


class TimedController(SpeculationController):
    """A controller that tells what its calls took."""

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken = dict(SECONDS)
        SECONDS.clear()
        return taken


for method in SCHEDULER:
    setattr(TimedController, method, timed(getattr(SpeculationController, method), method))


class TimedScheduler(scheduling.DraftLengthScheduler):
    """cotrain's scheduler in the engine core, with such a controller."""

    def __init__(self, *args: Any, **kwargs: Any):
        scheduling.SpeculationController = TimedController  # type: ignore[misc]
        scheduling.step_of = timed(scheduling.step_of, "step_of")
        super().__init__(*args, **kwargs)


async def measure(args: argparse.Namespace, scratch: Path, speculates: bool) -> None:
    """Start an engine and print a row for each batch size."""
    import torch

    from cotrain.models.loading import resolve_model
    from cotrain.rollout.vllm.arguments import EngineSpec
    from drafters.base import TargetSpec
    from drafters.build import build_drafter
    from drafters.config import Eagle3Config

    model = resolve_model(args.model)
    target = TargetSpec.from_pretrained(model)
    drafter = build_drafter(Eagle3Config(type="eagle3", draft_vocab_size=4096), target, seed=0)
    drafter.save(scratch / "drafter", torch.float32)
    rollout = RolloutConfig(
        prompts_per_step=max(args.batch), samples_per_prompt=1, max_prompt_tokens=64, max_new_tokens=args.tokens,
        ignore_eos=True, num_speculative_tokens=K, dtype="float32",
    )  # fmt: skip
    folder, serving = (str(scratch / "drafter"), drafter.serving) if speculates else (None, None)
    engine = rollout_engine.RolloutEngine(EngineSpec(rollout, str(model), folder, serving, 0, str(scratch / "rollout")))
    await engine.start()
    prompts = torch.randint(
        100, target.vocab_size, (max(args.batch), 40), generator=torch.Generator().manual_seed(0)
    ).tolist()
    if speculates:
        await engine.time_draft_lengths(prompts)
    for batch in args.batch:
        requests = [RolloutRequest(f"p{i}", 0, prompt, None) for i, prompt in enumerate(prompts[:batch])]
        await engine.generate(requests)
        await engine._speculation("take_seconds")
        seconds, of_depth = 0.0, 0.0
        for _ in range(args.rounds):
            generated = await engine.generate(requests)
            seconds += generated.seconds
            started = time.perf_counter()
            counts_by_depth(generated.rollouts)
            of_depth += time.perf_counter() - started
        inside = await engine._speculation("take_seconds")
        shares = [sum(inside.values()), of_depth]
        print(
            f"| {'EAGLE-3' if speculates else 'none'} | {batch} | {' | '.join(f'{s / seconds:.3%}' for s in shares)} |",
            flush=True,
        )
    await engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    os.environ.update(threads.engine_environment(threads.num_cores()))
    arguments = rollout_engine.engine_arguments
    rollout_engine.engine_arguments = lambda spec: (
        arguments(spec) | {"scheduler_cls": "benchmarks.recording_cost.TimedScheduler"}
    )
    print("| drafter | requests | scheduler | counts by depth |\n|---|---|---|---|")
    for speculates in (False, True):
        scratch = Path(tempfile.mkdtemp(prefix="cotrain-recording-", dir="/dev/shm"))
        try:
            asyncio.run(measure(args, scratch, speculates))
        finally:
            shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
