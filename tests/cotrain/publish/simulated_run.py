"""A drafter trainer and the engines it publishes to, simulated; see simulated.py for the rollouts."""

from pathlib import Path
from typing import Any

import numpy as np

from cotrain.records import Rollout, RolloutBatch, SwapReport, Versions, WeightPayload
from cotrain.rollout.acceptance_stats import counts_of_steps, total_counts
from cotrain.trainer.trainer import FreshScores
from cotrain.transport.payload import WeightUpdateRefused
from tests.cotrain.publish.simulated import DRAFT_TOKENS, acceptance_table, sample_rollouts, score

RANDOM, GOOD = -8.0, 1.0  # acceptance lengths 1.00 and 2.2
PROMPTS, SAMPLES = 8, 4


class World:
    """Trainer and engines in one; a drafter is its skill. Calls are noted in `calls`."""

    def __init__(self, skill: float = RANDOM, learns: float = 0.0, seed: int = 0):
        self.skill, self.learns, self.seed = skill, learns, seed
        self.published = {0: skill}
        self.updates = self.published_update = 0
        self.version = self.serving = 0
        self.served_as: dict[int, float] = {}
        """Versions that the engines serve with another skill than they were trained to."""
        self.refuses: set[int] = set()
        self.lost = False
        self.num_speculative_tokens = DRAFT_TOKENS
        self.calls: list[str] = []
        self.step = 0

    def generate(self, step: int) -> RolloutBatch:
        self.step = step
        rng = np.random.default_rng([self.seed, step])
        self.rollouts = sample_rollouts(rng, PROMPTS, SAMPLES)
        skill = self.served_as.get(self.serving, self.published[self.serving])
        table = acceptance_table(self.rollouts, skill, rng)
        out = []
        for row, length in enumerate(self.rollouts.lengths):
            steps, start = list[tuple[int, int]](), 0
            while start < length and self.num_speculative_tokens:
                k = 0
                while k < self.num_speculative_tokens and self.rollouts.luck[row, start + k] < table[row, k, start]:
                    k += 1
                steps.append((self.num_speculative_tokens, k))
                start += 1 + k
            found = counts_of_steps(steps, DRAFT_TOKENS) if steps else None
            versions = Versions(step - 1, self.serving)
            prompt, response = str(self.rollouts.prompts[row]), [3] * int(length)
            none = [0.0] * len(response)
            out.append(Rollout(prompt, row, [1, 2], response, none, "", "stop", versions, found, tuple(steps)))
        num_tokens = int(self.rollouts.lengths.sum())
        return RolloutBatch(
            out, [f"step {step}"], total_counts(r.speculation for r in out), num_tokens * 0.05, num_tokens
        )

    # the trainer

    def take_in(self, shards: Any, serving: int, keep: Any) -> tuple[FreshScores, dict[str, float]]:
        self.calls.append("take_in")
        assert {serving, *keep} <= self.published.keys()
        self.published = {version: self.published[version] for version in {serving, *keep}}
        rng = np.random.default_rng([self.seed, self.step, 1])
        rollouts = self.rollouts if shards else sample_rollouts(rng, 0, 0)
        serving_scores = score(rollouts, self.published[serving], rng)
        candidate = score(rollouts, self.skill, rng) if self.updates > self.published_update else None
        scores = FreshScores(rollouts.names, serving_scores, candidate, self.updates, [serving] * len(rollouts.names))
        return scores, {"drafter/buffer_tokens": 1.0}

    def train(self, step: int, num_updates: int) -> dict[str, float]:
        self.calls.append("train")
        self.skill, self.updates = self.skill + self.learns, self.updates + num_updates
        return {"drafter/train_s": 1.0, "drafter/loss": 2.0}

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def publish(self, weights_of: int | None) -> int:
        self.calls.append("publish" if weights_of is None else f"publish {weights_of}")
        self.version += 1
        if weights_of is None:
            self.published[self.version], self.published_update = self.skill, self.updates
        else:
            self.published[self.version] = self.published[weights_of]
        return self.version

    def write_payload(self, path: Path, version: int) -> WeightPayload:
        return WeightPayload(str(path), 10, {"fc.weight": str(version)})

    # the engines

    def update_drafter(self, payload: WeightPayload, drafter_version: int, expected_rates: Any = None) -> SwapReport:
        if drafter_version in self.refuses:
            raise WeightUpdateRefused("engine 1: fc.weight has non-finite values")
        self.serving = drafter_version
        return SwapReport(0.1, payload.num_bytes)

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]:
        return [{"fc.weight": "lost" if self.lost else str(self.serving)}] * 2

    def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        self.num_speculative_tokens = DRAFT_TOKENS if num_speculative_tokens is None else num_speculative_tokens

    def clear_drafter_cache(self) -> None:
        self.calls.append("reset")
