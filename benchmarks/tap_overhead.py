"""Cost of the feature tap: share of generation time spent in it, and generation with and without it in turns.

    python benchmarks/tap_overhead.py [--model bundled:smollm2-135m-instruct] [--batch 16] [--rounds 6]

Prints the share measured inside the worker (exact) and the ratio of tokens/s with the tap on and off (noisy).
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from cotrain.config.schema import RolloutConfig
from cotrain.process import threads
from cotrain.records import RolloutRequest


async def measure(args: argparse.Namespace, scratch: Path) -> None:
    """Start the engine with an untrained drafter and take turns."""
    import torch

    from cotrain.engine.arguments import EngineSpec
    from cotrain.engine.engine import RolloutEngine
    from cotrain.models.loading import resolve_model
    from drafters.base import TargetSpec
    from drafters.build import build_drafter
    from drafters.config import Eagle3Config

    model = resolve_model(args.model)
    target = TargetSpec.from_pretrained(model)
    drafter = build_drafter(Eagle3Config(type="eagle3", draft_vocab_size=args.draft_vocab), target, seed=0)
    drafter.save(scratch / "drafter", torch.bfloat16)
    rollout = RolloutConfig(
        prompts_per_step=args.batch,
        samples_per_prompt=1,
        max_prompt_tokens=64,
        max_new_tokens=args.tokens,
        ignore_eos=True,
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, target.vocab_size, (args.batch, 40), generator=generator).tolist()
    requests = [RolloutRequest(f"p{i}", 0, prompt, None) for i, prompt in enumerate(prompts)]
    spec = EngineSpec(rollout, str(model), str(scratch / "drafter"), drafter.serving, 0, str(scratch / "rollout"))
    engine = RolloutEngine(spec)
    await engine.start()
    await engine.generate(requests)
    shares, ratios = [], []
    for i in range(args.rounds):
        speed = {}
        for tap in (True, False) if i % 2 else (False, True):
            batch = await engine.generate(requests, tap=tap)
            speed[tap] = batch.num_generated_tokens / batch.seconds
            if tap:
                shares.append(batch.feature_stats["record_seconds"] / batch.seconds)
        ratios.append(speed[True] / speed[False])
    await engine.shutdown()
    print(f"tap: {100 * statistics.median(shares):.2f} % of generation time (max {100 * max(shares):.2f} %)")
    print(f"tokens/s with the tap / without: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    os.environ.update(threads.engine_environment(threads.num_cores()))
    scratch = Path(tempfile.mkdtemp(prefix="cotrain-tap-", dir="/dev/shm"))
    try:
        asyncio.run(measure(args, scratch))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
