"""What a check of the monitor costs the policy learner, by stage: the layers, the output head, and the reduction to draws.

    python -m benchmarks.monitor_check [--model bundled:smollm2-135m-instruct] [--rollouts 10] [--length 150] [--rounds 5]

A check reads about lossless.tokens = 2,048 tokens of rollouts and their prompts, one at a time, as PolicyLearner.response_draws
does. If it took its rows from the update's own forward pass, it would save the first stage and nothing else. The last row is
that pass: the same rollouts forward and backward in one padded micro-batch.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from cotrain.lossless.emitted import CHUNK_ROWS, emitted_draws, response_draws
from cotrain.models.loading import resolve_model
from cotrain.policy.log_probs import ResponseLogProbs
from cotrain.process import threads
from drafters.base import SamplingParams

PROMPT = 53
"""Tokens of a prompt of the quickstart."""


def stages(model: Any, rollouts: list[tuple[list[int], list[int]]]) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    sampling, head, rows = SamplingParams(1.0, 1.0, 0, "probabilistic"), model.get_output_embeddings(), []
    wrapped = ResponseLogProbs(model, 1.0, torch.float32)
    tokens = torch.tensor([prompt + response for prompt, response in rollouts])
    positions = torch.arange(tokens[:, :-1].numel()).view(len(rollouts), -1)[:, PROMPT - 1 :].flatten()

    @torch.no_grad()
    def layers() -> None:
        rows.clear()
        for row in tokens:
            rows.append(model.base_model(input_ids=row[None, :-1], use_cache=False).last_hidden_state[0, PROMPT - 1 :])

    @torch.no_grad()
    def logits() -> list[torch.Tensor]:
        return [head(part).float() for hidden in rows for part in hidden.split(CHUNK_ROWS)]

    @torch.no_grad()
    def reduction() -> None:
        parts = [part for row in tokens for part in row[PROMPT:].split(CHUNK_ROWS)]
        for scores, part in zip(made, parts, strict=True):
            emitted_draws(scores, part, sampling)

    def update() -> None:
        log_probs, _ = wrapped(tokens[:, :-1], None, positions, tokens[:, PROMPT:].flatten())
        log_probs.sum().backward()
        model.zero_grad()

    layers()
    made = logits()
    return {
        "the whole check": lambda: [response_draws(model, *rollout, sampling) for rollout in rollouts],
        "layers": layers,
        "output head": logits,
        "reduction to draws": reduction,
        "forward and backward": update,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--length", type=int, default=150, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=torch.float32).eval()
    ids = torch.randint(model.config.vocab_size, (args.rollouts, PROMPT + args.length)).tolist()
    print(f"{args.rollouts} responses of {args.length} tokens after {PROMPT}; {torch.get_num_threads()} threads")
    print(f"{'seconds':22s}{'by the clock: median':>22s}{'least':>8s}{'of the CPU: median':>22s}{'least':>8s}")
    for name, stage in stages(model, [(row[:PROMPT], row[PROMPT:]) for row in ids]).items():
        times = []
        for _ in range(args.rounds):
            began, cpu = time.perf_counter(), time.process_time()
            stage()
            times.append((time.perf_counter() - began, time.process_time() - cpu))
        clock, used = zip(*times, strict=True)
        figures = (statistics.median(clock), min(clock), statistics.median(used), min(used))
        print("{:22s}{:22.3f}{:8.3f}{:22.3f}{:8.3f}".format(name, *figures))


if __name__ == "__main__":
    environment = threads.openmp_environment()
    if os.environ.get("LD_PRELOAD") != environment.get("LD_PRELOAD"):  # the OpenMP runtime is chosen at process start
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.monitor_check", *sys.argv[1:]], os.environ | environment
        )
    main()
