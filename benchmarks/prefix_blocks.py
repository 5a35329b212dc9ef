"""What small blocks of the KV cache are worth on a CPU, where a prompt is found in the prefix cache by whole blocks.

    python -m benchmarks.prefix_blocks                                     # the prompts and samples of a quickstart step
    python -m benchmarks.prefix_blocks --long 600 --tokens 64 --blocks 128 32    # long prompts that share nothing

Engines with different block sizes take turns in generating the same batches, each after its prefix cache was emptied, as by an
update of the policy. Every response has --tokens tokens. Prints, for each block size, the seconds of generation and the processor
seconds of the engine over those with the first block size (geometric means of the rounds, and their standard errors), the share of
prompt tokens that came from the cache, and the positions that the tap has no hidden state of. Processor seconds hardly depend on what
else runs on the machine.
"""

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cotrain.config.load import load_config
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.engine import RolloutEngine
from cotrain.process import threads
from cotrain.process.scratch import scratch_folder
from cotrain.records import Rollout, RolloutBatch, RolloutRequest


class CountingEngine(RolloutEngine):
    """Counts the prompt tokens of a call that came from the prefix cache, and the processor seconds of its own processes."""

    async def start(self) -> None:
        others = set(psutil.Process().children(recursive=True))
        await super().start()
        self._processes = set(psutil.Process().children(recursive=True)) - others

    def processor_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes if process.is_running()]
        return sum(t.user + t.system for t in times)

    async def generate(self, requests: list[RolloutRequest], **options: Any) -> RolloutBatch:
        self.cached_tokens = 0
        return await super().generate(requests, **options)

    def _rollout(self, request: RolloutRequest, output: Any) -> Rollout:
        self.cached_tokens += output.num_cached_tokens or 0
        return super()._rollout(request, output)


async def measure(options: argparse.Namespace, scratch: Path) -> None:
    """Start an engine for each block size, and let them take turns."""
    import torch
    from transformers import AutoTokenizer

    from cotrain.models.loading import resolve_model
    from cotrain.tasks.base import build_task
    from cotrain.tasks.prompts import apply_template
    from drafters.base import TargetSpec
    from drafters.build import build_drafter

    config = load_config([options.config], [])
    assert config.drafter is not None
    rollout, model = config.rollout, resolve_model(config.policy.model)
    target, count = TargetSpec.from_pretrained(model), config.rollout.prompts_per_step
    drafter = build_drafter(config.drafter.model, target, seed=0)
    drafter.save(scratch / "drafter", torch.float32)
    if options.long:
        draw = np.random.default_rng(0)
        prompts = draw.integers(100, target.vocab_size, ((options.rounds + 1) * count, options.long)).tolist()
    else:
        task, tokenizer = build_task(config.task, 0), AutoTokenizer.from_pretrained(model)
        prompts = [apply_template(tokenizer, task[i].messages) for i in range((options.rounds + 1) * count)]
    samples = 1 if options.long else rollout.samples_per_prompt
    changes = {"max_prompt_tokens": max(map(len, prompts)), "max_new_tokens": options.tokens, "ignore_eos": True}
    engines = {}
    for block in options.blocks:
        own = changes | {"vllm": rollout.vllm | {"block_size": block}}
        folder = scratch / str(block)
        spec = EngineSpec(
            rollout.model_copy(update=own), str(model), str(scratch / "drafter"), drafter.serving, 0, str(folder)
        )
        engines[block] = CountingEngine(spec)
        await engines[block].start()
        await engines[block].set_num_speculative_tokens(options.k)
    seconds: dict[int, list[tuple[float, float]]] = {block: [] for block in options.blocks}
    cached, holes = dict.fromkeys(options.blocks, 0), dict.fromkeys(options.blocks, 0.0)
    for turn in range(options.rounds + 1):
        here = prompts[turn * count : (turn + 1) * count]
        requests = [RolloutRequest(f"p{i}", s, ids, None) for i, ids in enumerate(here) for s in range(samples)]
        first = turn % len(options.blocks)
        for block in options.blocks[first:] + options.blocks[:first]:
            await engines[block].reset_prefix_cache()
            before = engines[block].processor_seconds()
            batch = await engines[block].generate(requests)
            used = engines[block].processor_seconds() - before
            for shard in batch.features:
                Path(shard).unlink()
            if turn:  # the first turn warms up
                seconds[block].append((batch.seconds, used))
                cached[block] += engines[block].cached_tokens
                holes[block] += batch.feature_stats["num_holes"]
    for engine in engines.values():
        await engine.shutdown()
    prompt_tokens = samples * sum(map(len, prompts[count:]))
    print(
        f"{count} prompts x {samples} samples, k = {options.k}, {options.tokens} tokens a response, {options.rounds} rounds"
    )
    print("| tokens a block | seconds | ratio | processor seconds, ratio | prompt tokens from the cache | holes |")
    print("|--:|--:|--:|--:|--:|--:|")
    for block in options.blocks:
        ratios = np.log(np.array(seconds[block]) / np.array(seconds[options.blocks[0]]))
        means = np.exp(ratios.mean(0))
        errors = means * ratios.std(0, ddof=1) / len(ratios) ** 0.5
        cells = [f"{mean:.2f} ± {error:.2f}" for mean, error in zip(means, errors, strict=True)]
        shares = f"{cached[block] / prompt_tokens:.0%} | {holes[block]:.0f}"
        print(f"| {block} | {np.median([s for s, _ in seconds[block]]):.2f} | {' | '.join(cells)} | {shares} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="configs/quickstart.toml", help="policy, prompts and shape of a step (%(default)s)"
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 64, 32], help="block sizes (%(default)s)")
    parser.add_argument("--long", type=int, default=0, metavar="N", help="random prompts of N tokens, one sample each")
    parser.add_argument("--k", type=int, default=1, help="draft length (%(default)s)")
    parser.add_argument("--tokens", type=int, default=10, help="tokens of each response (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds that count (%(default)s)")
    options = parser.parse_args()
    os.environ.update(threads.engine_environment(threads.num_cores()))
    with scratch_folder("blocks") as scratch:
        asyncio.run(measure(options, scratch))


if __name__ == "__main__":
    main()
