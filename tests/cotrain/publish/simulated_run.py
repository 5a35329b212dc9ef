"""A drafter trainer and the engines it publishes to, simulated; see simulated.py for the rollouts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotrain.acceptance_stats import counts_of
from cotrain.publish.evidence import FreshScores, enough
from cotrain.records import Rollout, RolloutBatch, SwapReport, Versions, WeightPayload
from cotrain.trainer.buffer import spread_over_prompts
from cotrain.trainer.spec import MAX_ROLLOUTS
from cotrain.weights.payload import WeightUpdateRefused
from cotrain.weights.versions import CurrentWeights
from tests.cotrain.publish.simulated import (
    DRAFT_TOKENS,
    Lengths,
    Rollouts,
    acceptance_table,
    sample_rollouts,
    scores_of,
    usual_lengths,
)

RANDOM, GOOD = -8.0, 1.0  # acceptance lengths 1.00 and 2.2
PROMPTS, SAMPLES = 8, 4


class World:
    """Trainer and engines in one; a drafter is its skill, and the updates behind it. Calls are noted in `calls`."""

    def __init__(
        self,
        skill: float = RANDOM,
        learns: float = 0.0,
        seed: int = 0,
        prompts: int = PROMPTS,
        samples: int = SAMPLES,
        lengths: Lengths = usual_lengths,
    ):
        self.skill, self.learns, self.seed = skill, learns, seed
        self.prompts, self.samples, self.lengths = prompts, samples, lengths
        self.published = {0: (skill, 0)}
        self.updates = self.published_update = 0
        self.held: tuple[float, int] | None = None
        self.gathered: FreshScores | None = None
        self.version = 0
        self.current = CurrentWeights(Versions(0, 0))
        self.served_as: dict[int, float] = {}
        """Versions that the engines serve with another skill than they were trained to."""
        self.refuses: set[int] = set()
        self.lost = False
        self.num_speculative_tokens = DRAFT_TOKENS
        self.calls: list[str] = []
        self.step = 0

    @property
    def serving(self) -> int:
        return self.current.versions.drafter

    def generate(self, step: int) -> RolloutBatch:
        rng = np.random.default_rng([self.seed, step])
        rollouts = sample_rollouts(rng, self.prompts, self.samples, self.lengths)
        return self.serve(step, rollouts, [Versions(step - 1, self.serving)] * len(rollouts.names))

    def serve(self, step: int, rollouts: Rollouts, versions: Sequence[Versions]) -> RolloutBatch:
        """A step in which these rollouts have ended, with the versions of their last segments."""
        self.step, self.rollouts, self.versions = step, rollouts, versions
        drafters = {v.drafter: self.published[v.drafter] for v in versions}
        drafters |= {v: (self.served_as[v], -1) for v in drafters if v in self.served_as}
        tables = {version: self._table(drafter) for version, drafter in drafters.items()}
        out = [self._serve(row, tables[of.drafter][row], of) for row, of in enumerate(versions)]
        num_tokens, counts = int(rollouts.lengths.sum()) + len(out), counts_of(out)
        return RolloutBatch(out, [f"step {step}"] if out else [], num_tokens * 0.05, num_tokens, speculation=counts)

    def _table(self, drafter: tuple[float, int]) -> NDArray:
        skill, updates = drafter
        return acceptance_table(self.rollouts, skill, np.random.default_rng([self.seed, self.step, updates + 2]))

    def _serve(self, row: int, table: NDArray, versions: Versions) -> Rollout:
        """One rollout, drafted throughout. table [K, L]: chances that drafts of the drafter are accepted."""
        steps, start = list[tuple[int, int]](), 0
        length, most = int(self.rollouts.lengths[row]), self.num_speculative_tokens
        while start < length and most:
            luck = self.rollouts.luck[row, start : start + most]
            steps.append((most, int((luck < table[:most, start]).cumprod().sum())))
            start += 1 + steps[-1][1]
        response = [3] * (length + 1)
        return Rollout(str(self.rollouts.prompts[row]), row, [1, 2], response, [0.0] * len(response), "", "stop",
                       versions, tuple(steps))  # fmt: skip

    # the trainer, with what DrafterTrainer does about a candidate that waits for more rollouts

    def take_in(self, shards: Any, serving: int, keep: Any, judged: int) -> tuple[FreshScores, dict[str, float]]:
        self.calls.append("take_in")
        assert {serving, *keep} <= self.published.keys()
        self.held = None if self.held is not None and self.held[1] <= judged else self.held
        candidate = self.held or (self.skill, self.updates)
        tapped = np.flatnonzero(self.rollouts.lengths if shards else []).tolist()
        named = [SimpleNamespace(prompt_key=self.rollouts.names[row], row=row) for row in tapped]
        rows = [one.row for one in spread_over_prompts(named, MAX_ROLLOUTS)]  # type: ignore[arg-type]
        rollouts, table = self.rollouts.only(rows), self._table(self.published[serving])[rows]
        has_candidate = candidate[1] > max(self.published_update, judged)
        ours = scores_of(rollouts, self._table(candidate)[rows]) if has_candidate else None
        served_by = [self.versions[row].drafter for row in rows]
        fresh = FreshScores(rollouts.names, scores_of(rollouts, table), ours, candidate[1], served_by)
        self.gathered = fresh.after(self.gathered)
        return replace(fresh, gathered=self.gathered), {"drafter/buffer_tokens": 1.0}

    def train(self, step: int, num_updates: int) -> dict[str, float]:
        self.calls.append("train")
        if self.gathered and self.gathered.candidate and not enough(self.gathered.prompts) and self.held is None:
            self.held = self.skill, self.updates
        self.skill, self.updates = self.skill + self.learns, self.updates + num_updates
        return {"drafter/train_s": 1.0, "drafter/loss": 2.0}

    def publish(self, weights_of: int | None) -> int:
        self.calls.append("publish" if weights_of is None else f"publish {weights_of}")
        self.version += 1
        if weights_of is None:
            self.published[self.version] = self.held or (self.skill, self.updates)
            self.published_update = self.published[self.version][1]
        else:
            self.published[self.version] = self.published[weights_of]
        self.held = self.gathered = None
        return self.version

    def write_payload(self, path: Path, version: int) -> WeightPayload:
        return WeightPayload(str(path), 10, {"fc.weight": str(version)})

    # the engines

    def update_drafter(self, payload: WeightPayload, drafter_version: int, expected_rates: Any = None) -> SwapReport:
        self.current.record_attempt(drafter_version)
        if drafter_version in self.refuses:
            raise WeightUpdateRefused("engine 1: fc.weight has non-finite values")
        self.sent_rates = expected_rates
        self.current.record_drafter(payload, drafter_version)
        return SwapReport(0.1, payload.num_bytes)

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]:
        return [{"fc.weight": "lost" if self.lost else str(self.serving)}] * 2

    def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        self.num_speculative_tokens = DRAFT_TOKENS if num_speculative_tokens is None else num_speculative_tokens

    def clear_drafter_cache(self) -> None:
        self.calls.append("reset")
