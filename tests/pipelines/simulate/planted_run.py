"""A run with a clock and nothing else: engines whose steps cost what a formula says, recorded as a real run records.

It knows nothing of the simulator: requests go one by one, and the real controller chooses draft lengths and adds up steps.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cotrain.acceptance_stats import counts_by_depth
from cotrain.config.load import write_config
from cotrain.config.schema import RunConfig
from cotrain.engine.speculation.draft_length import DraftLengths, Step
from cotrain.records import Rollout, StepTotal, Versions
from cotrain.run.rows import RowFile, read_rows

K, SAMPLES, PROMPT_TOKENS = 2, 4, 40
EARLY, LATE = (0.75, 0.6), (0.55, 0.4)
"""Acceptance of each draft position after those before it, in the first 128 tokens of a response and behind them."""

PREFILL_TOKENS_PER_S, NOISE = 20_000.0, 0.03
AROUND, UPDATE, DRAFTER, SWAP, OTHER = 0.06, 1.5, 0.4, 0.1, 0.2
"""Seconds of a step beside those of its engines."""


def seconds_of(k: float, batch: int) -> float:
    """Of a decode step: memory-bound at first, and each draft token costs more in a large batch."""
    return float(0.010 + 0.0008 * batch + k * (0.0012 + 0.0003 * batch))


@dataclass
class Request:
    length: int
    done: int = 0
    pending: int = 0


class PlantedEngine:
    """Runs requests in order, as many at once as it has slots."""

    def __init__(self, k: int, slots: int, seed: int):
        self.controller, self.slots = DraftLengths(k, slots), slots
        self.random, self.now = np.random.default_rng(seed), 0.0
        if k:
            self.controller.adapt()

    def generate(self, lengths: list[int]) -> list[list[tuple[int, int]]]:
        """The verification steps of each response."""
        requests = [Request(length) for length in lengths]
        steps: list[list[tuple[int, int]]] = [[] for _ in requests]
        waiting, running = deque(range(len(requests))), list[int]()
        while waiting or running:
            drafted = self.controller.choose(self.now)
            new = [waiting.popleft() for _ in range(min(len(waiting), self.slots - len(running)))]
            running += new
            batch, drafts, tokens = len(running), [], 0
            k = drafted[batch]
            for i in running:
                request, accepted = requests[i], 0
                if request.pending:
                    rates = EARLY if request.done < 128 else LATE
                    accepted = int(np.cumprod(self.random.random(request.pending) < rates[: request.pending]).sum())
                    drafts.append((request.pending, accepted))
                    steps[i].append(drafts[-1])
                tokens += 1 + accepted
                request.done, request.pending = request.done + 1 + accepted, k
            self.controller.observe(Step(k, batch, bool(new), drafts, tokens))
            verified = sum(drafted for drafted, _ in drafts) / batch
            seconds = seconds_of((k + verified) / 2, batch) if not new else seconds_of(k, batch)
            seconds += len(new) * PROMPT_TOKENS / PREFILL_TOKENS_PER_S
            self.now += seconds * float(np.exp(NOISE * self.random.standard_normal()))
            running = [i for i in running if requests[i].done < requests[i].length]
        self.controller.idle(self.now)
        return steps


def lengths_of(step: int, prompts: int) -> list[list[int]]:
    """Of each prompt's samples; the same in every run."""
    random = np.random.default_rng(step)
    means = 5.0 + 0.5 * random.standard_normal((prompts, 1))
    return np.exp(means + 0.5 * random.standard_normal((prompts, SAMPLES))).astype(int).clip(2, 600).tolist()


def write_run(folder: Path, steps: int = 8, k: int = K, slots: int = 8, engines: int = 1, **fields: Any) -> Path:
    """A run of so many steps of 8 prompts; k = 0 is one without a drafter."""
    rollout = {"prompts_per_step": 8, "samples_per_prompt": SAMPLES, "num_engines": engines, "order": "drawn"}
    rollout |= {"max_prompt_tokens": 64, "max_new_tokens": 600, "vllm": {"max_num_seqs": slots}}
    rollout |= {"num_speculative_tokens": k} if k else {}
    fields = {"drafter": {"model": {"type": "eagle3"}} if k else None, "rollout": rollout} | fields
    model, task = {"model": "tiny:llama"}, {"type": "reasoning_gym", "name": "chain_sum"}
    folder.mkdir(parents=True)
    write_config(RunConfig(name=folder.name, steps=steps, policy=model, task=task, **fields), folder / "config.json")
    files = {name: RowFile(folder / f"{name}.jsonl") for name in ("metrics", "stream", "steps")}
    running = [PlantedEngine(k, slots, seed) for seed in range(engines)]
    for step in range(1, steps + 1):
        groups, rollouts, busy, recorded = lengths_of(step, 8), list[Rollout](), [0.0], {}
        for number, lengths in enumerate(groups):
            event = {"group": 8 * step + number, "engine": number % engines}
            files["stream"].write(step, event | {"event": "dispatched"})
            told = {"prompt": str(number), "lengths": lengths, "prompt_tokens": PROMPT_TOKENS}
            files["stream"].write(step, event | told | {"event": "finished"})
        for i, engine in enumerate(running):
            began, share = engine.now, [length for group in groups[i::engines] for length in group]
            verified = engine.generate(share)
            rollouts += [
                Rollout("p", 0, [1], [5] * n, [], "", "stop", Versions(0, 0), tuple(s))
                for n, s in zip(share, verified, strict=True)
            ]
            busy.append(engine.now - began)
            recorded[i] = [StepTotal(*row) for row in engine.controller.report()["steps"]]
        files["steps"].write(step, {"engines": recorded, "acceptance": counts_by_depth(rollouts)})
        times = {
            "generate": max(busy) + AROUND,
            "learn": UPDATE + DRAFTER * (k > 0),
            "update": UPDATE,
            "swap_policy": SWAP,
        }
        whole = times["generate"] + times["learn"] + SWAP + OTHER
        files["metrics"].write(step, {f"time/{name}_s": value for name, value in (times | {"step": whole}).items()})
    return folder


def measured_generation(folder: Path) -> float:
    """Mean seconds of generating."""
    rows = read_rows(folder / "metrics.jsonl")
    return sum(row["time/generate_s"] for row in rows) / len(rows)
