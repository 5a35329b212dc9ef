"""What drafting from history costs an engine on the host: time of a step, of learning a token, and the longest stall.

    python -m benchmarks.history_step [--sizes 20000 1000000 3000000] [--requests 16 64 256] [--length 1000]

HistoryDrafting's hook runs alone, without an engine, drafter and sampler. Its index grows to each size by rollouts of --length tokens to 64
prompts, from a random chain in which each of 20,000 tokens has three successors, of probabilities 0.7, 0.2 and 0.1. Each request then
continues one of those prompts by the same chain, at k = 2 with drawn drafts and 49,152 tokens in the vocabulary. Prints two Markdown
tables. Steps: medians of processor time and of wall time in milliseconds, where the acceptance so far says that drafts pay, and where
it says that none does. Learning: processor time a token, and the longest piece of work while the index grew to that size, in milliseconds
of processor time and of wall time. A step waits for such a piece at most; mostly it is done while the engine computes.
"""

import argparse
import datetime
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cotrain.engine.history import HistoryDrafting
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.speculation.served_acceptance import ServedAcceptance
from cotrain.run.provenance import machine
from drafters.suffix.index import SuffixIndex

K, PROMPT, PROMPTS, TOKENS, STEPS = 2, 20, 64, 20_000, 61
ROOM = 2**30 + 2**29


class Chain:
    """Text in which each token has three successors."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._successors = self._rng.integers(0, TOKENS, (TOKENS, 3)).tolist()

    def after(self, token: int, length: int) -> list[int]:
        """Return the next `length` tokens."""
        tokens = []
        for branch in self._rng.choice(3, length, p=[0.7, 0.2, 0.1]).tolist():
            token = self._successors[token][branch]
            tokens.append(token)
        return tokens


class Engine:
    """A runner whose requests have prompt and response in its batch, and its hook."""

    def __init__(self, length: int, most_requests: int):
        self.chain, self.length = Chain(), length
        self.prompts = [self.chain.after(i, PROMPT) for i in range(PROMPTS)]
        rows = [self.prompts[i % PROMPTS] for i in range(most_requests)]
        texts = np.array([prompt + self.chain.after(prompt[-1], length) for prompt in rows], np.int32)
        self.batch = SimpleNamespace(token_ids_cpu=texts, vocab_size=49_152)
        self.batch.num_prompt_tokens = np.full(most_requests, PROMPT)
        self.batch.num_tokens_no_spec = np.full(most_requests, PROMPT)
        runner: Any = SimpleNamespace(num_spec_tokens=K, requests={}, device="cpu", input_batch=self.batch)
        runner.discard_request_mask = SimpleNamespace(np=np.zeros(most_requests, bool))
        runner.propose_draft_token_ids = None
        self.runner, self.history = runner, HistoryDrafting(runner, SuffixIndex(ROOM), draws=True)
        self.begun = self.added = 0

    def begin(self, requests: int) -> None:
        """Let new requests take the place of those that run."""
        self.begun += 1
        self.batch.req_ids = [f"{self.begun}/{i}" for i in range(requests)]
        self.runner.requests = dict.fromkeys(self.batch.req_ids)

    def step(self, number: int, pays: bool) -> None:
        """Make one step, in which each request has emitted a token. pays: what the acceptance so far says of drafts."""
        self.history._of_match = [ServedAcceptance(K, [float(pays)] * K) for _ in self.history._of_match]
        self.batch.num_tokens_no_spec[:] = length = PROMPT + self.length // 2 + number
        sampled = self.batch.token_ids_cpu[: len(self.batch.req_ids), length - 1 : length].tolist()
        plan = Plan([1.0, 1.2, 1.4])
        output = SimpleNamespace(num_spec_tokens_to_schedule=K, scheduled_spec_decode_tokens={}, cotrain=plan)
        self.runner.propose_draft_token_ids(output, sampled, SimpleNamespace(all_greedy=False, all_random=True))

    def step_times(self, requests: int, pays: bool) -> tuple[float, float]:
        """Return the median processor time and wall time of a step, in milliseconds."""
        self.begin(requests)
        times = []
        for number in range(STEPS):
            before = time.process_time(), time.perf_counter()
            self.step(number, pays)
            times.append((time.process_time() - before[0], time.perf_counter() - before[1]))
        cpu, wall = 1e3 * np.median(times[STEPS // 3 :], axis=0)
        return float(cpu), float(wall)

    def grow(self, size: int) -> tuple[float, float, float]:
        """Add rollouts up to this size of the index. Returns seconds of processor time a token, and of the longest piece, in
        processor time and in wall time.
        """
        spent, longest, first = 0.0, [0.0, 0.0], self.added
        while self.added < size:
            prompt = self.prompts[self.added // self.length % PROMPTS]
            rollout = prompt, self.chain.after(prompt[-1], self.length)
            begin: Callable[[], None] = functools.partial(self.history.add, [rollout])
            while True:
                before = time.process_time(), time.perf_counter()
                begin()
                behind = self.history.index.is_behind  # waits for the piece that the thread learns
                times = time.process_time() - before[0], time.perf_counter() - before[1]
                spent, longest = spent + times[0], [max(pair) for pair in zip(longest, times, strict=True)]
                if not behind:
                    break
                begin = self.history._go_on_learning
            self.added += self.length
        return spent / max(1, self.added - first), *longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[20_000, 1_000_000, 3_000_000], help="tokens in the index"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64, 256], help="requests at once")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a response (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()['cpu']}, {datetime.date.today()}, responses of {args.length} tokens, k = {K}\n")
    engine = Engine(args.length, max(args.requests))
    engine.grow(2 * args.length)  # compiles
    engine.step_times(1, True)
    learning = [
        "| tokens in the index | us a token learnt | longest piece: CPU, ms | wall, ms | bytes a token |\n|--:|--:|--:|--:|--:|"
    ]
    print(
        "| tokens in the index | requests | no draft pays: CPU, ms | drafts pay: CPU, ms | wall, ms |\n|--:|--:|--:|--:|--:|"
    )
    for size in args.sizes:
        seconds, *stall = engine.grow(size)
        index = engine.history.index
        tokens = f"| {index.num_tokens:,} |"
        cpu, wall = (f"{1e3 * longest:.1f}" for longest in stall)
        learning.append(f"{tokens} {1e6 * seconds:.2f} | {cpu} | {wall} | {index.num_bytes / index.num_tokens:.0f} |")
        for requests in args.requests:
            off, pays = engine.step_times(requests, False), engine.step_times(requests, True)
            print(f"{tokens} {requests} | {off[0]:.2f} | {pays[0]:.2f} | {pays[1]:.2f} |", flush=True)
    print("\n" + "\n".join(learning))


if __name__ == "__main__":
    main()
