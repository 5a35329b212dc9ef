"""What drafting from history adds to an engine step on the host, by requests at once, where no draft pays and where drafts do.

    python -m benchmarks.history_step

Prints a Markdown table of median milliseconds of HistoryDrafting's hook, alone and without an engine: 16 prompts with 25 texts each in the
index, 100 tokens a text, from a random chain in which each of 300 tokens has three successors. It leaves out the drafter and the sampler.
"""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cotrain.engine.history import HistoryDrafting
from cotrain.engine.interface import attach
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.speculation.served_acceptance import ServedAcceptance
from drafters.suffix.index import SuffixIndex

K, PROMPT, LENGTH, PROMPTS, SAMPLES, STEPS = 2, 20, 100, 16, 25, 300
BATCHES = 1, 4, 16, 64


def chain(rng: np.random.Generator, successors: np.ndarray, length: int) -> list[int]:
    tokens = [int(rng.integers(len(successors)))]
    while len(tokens) < length:
        tokens.append(int(rng.choice(successors[tokens[-1]])))
    return tokens


def prepared(batch: int) -> tuple[Any, HistoryDrafting]:
    """Return a runner whose requests have prompt and response in its batch, and its hook with a full index."""
    rng = np.random.default_rng(0)
    successors = rng.integers(0, 300, (300, 3))
    prompts = [chain(rng, successors, PROMPT) for _ in range(PROMPTS)]
    texts = np.array([prompts[i % PROMPTS] + chain(rng, successors, LENGTH) for i in range(batch)], np.int32)
    in_batch = SimpleNamespace(
        req_ids=[str(i) for i in range(batch)],
        num_tokens_no_spec=np.zeros(batch, np.int64),
        num_prompt_tokens=np.full(batch, PROMPT),
        token_ids_cpu=texts,
        vocab_size=49_152,
    )
    runner: Any = SimpleNamespace(
        num_spec_tokens=K, requests=dict.fromkeys(in_batch.req_ids), device="cpu", input_batch=in_batch
    )
    runner.discard_request_mask = SimpleNamespace(np=np.zeros(batch, bool))
    runner.propose_draft_token_ids = runner.take_draft_token_ids = None
    history = HistoryDrafting(runner, SuffixIndex(2**26), draws=True)
    for _ in range(SAMPLES):
        history.add([(prompt, chain(rng, successors, LENGTH)) for prompt in prompts])
    return runner, history


def milliseconds(batch: int, pays: bool) -> float:
    runner, history = prepared(batch)
    seconds = []
    sampling = SimpleNamespace(all_greedy=False, all_random=True)
    for step in range(STEPS):
        history._of_match = [ServedAcceptance(K, [float(pays)] * K) for _ in history._of_match]
        runner.input_batch.num_tokens_no_spec[:] = length = PROMPT + 1 + step % (LENGTH - 1)
        sampled = runner.input_batch.token_ids_cpu[:, length - 1 : length].tolist()
        output = SimpleNamespace(num_spec_tokens_to_schedule=K, scheduled_spec_decode_tokens={})
        attach(output, Plan("", [1.0, 1.2, 1.4], 0, 1.0, ""))
        started = time.perf_counter()
        runner.propose_draft_token_ids(output, sampled, sampling)
        seconds.append(time.perf_counter() - started)
    return 1e3 * float(np.median(seconds[STEPS // 3 :]))


def main() -> None:
    torch.set_num_threads(1)
    print("| requests at once | no draft pays | drafts pay |\n|---|---|---|")
    for batch in BATCHES:
        print(f"| {batch} | {milliseconds(batch, False):.2f} | {milliseconds(batch, True):.2f} |")


if __name__ == "__main__":
    main()
