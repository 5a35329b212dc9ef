"""Drafters on simulated rollouts: how well tokens can be drafted varies by prompt, rollout and token.

A drafter is its skill, and a noise of its own, by which it is better on some prompts and tokens than on others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from cotrain.records import SpeculationCounts
from drafters.acceptance import RolloutAcceptance, StartAcceptance, rollout_acceptances
from tests.speculation_counts import counts

DRAFT_TOKENS = 3
DEPTH_COST = 0.4

Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Response tokens of so many rollouts, behind the first, which no drafter drafts."""


@dataclass(frozen=True)
class Rollouts:
    """R rollouts of one policy: what every drafter meets in the same way."""

    prompts: NDArray[np.int64]  # [R]
    lengths: NDArray[np.int64]  # [R]
    difficulty: NDArray[np.float64]  # [R, L + DRAFT_TOKENS], L the longest length
    luck: NDArray[np.float64]  # same shape, uniform: a draft is accepted where its probability is above

    @property
    def longest(self) -> int:
        return self.luck.shape[1] - DRAFT_TOKENS

    def only(self, rows: Sequence[int]) -> "Rollouts":
        return Rollouts(*(getattr(self, field.name)[list(rows)] for field in fields(self)))

    @property
    def names(self) -> list[str]:
        """Each rollout's prompt."""
        return [str(prompt) for prompt in self.prompts]


def usual_lengths(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
    return rng.integers(12, 49, number)


def sample_rollouts(
    rng: np.random.Generator, num_prompts: int, samples: int, lengths: Lengths = usual_lengths
) -> Rollouts:
    """`samples` rollouts for each prompt."""
    prompts = np.repeat(np.arange(num_prompts), samples)
    return rollouts_of(rng, prompts, lengths(rng, len(prompts)))


def rollouts_of(rng: np.random.Generator, prompts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Rollouts:
    """A rollout of each of these lengths to each of these prompts [R]."""
    shape = (len(prompts), int(lengths.max(initial=1)) + DRAFT_TOKENS)
    _, number = np.unique(prompts, return_inverse=True)
    difficulty = rng.normal(0, 0.5, number.max(initial=-1) + 1)[number][:, None]
    difficulty = difficulty + rng.normal(0, 0.3, (len(prompts), 1)) + rng.normal(0, 1.5, shape)
    return Rollouts(prompts, lengths, difficulty, rng.random(shape))


def acceptance_table(rollouts: Rollouts, skill: float, rng: np.random.Generator, own: float = 0.2) -> NDArray:
    """Probability [R, K, L] that a drafter's draft token is accepted. own: spread of its own noise over prompts."""
    _, number = np.unique(rollouts.prompts, return_inverse=True)
    logit = skill - rollouts.difficulty + rng.normal(0, own, number.max(initial=-1) + 1)[number][:, None]
    logit = logit + rng.normal(0, 2.5 * own, logit.shape)
    windows = [logit[:, k : k + rollouts.longest] for k in range(DRAFT_TOKENS)]
    return np.stack([1 / (1 + np.exp(DEPTH_COST * k - window)) for k, window in enumerate(windows)], 1)


def score(
    rollouts: Rollouts,
    skill: float,
    rng: np.random.Generator,
    own: float = 0.2,
) -> list[RolloutAcceptance]:
    """What a forward pass over the rollouts knows of a drafter, at each draft length."""
    return scores_of(rollouts, acceptance_table(rollouts, skill, rng, own))


def scores_of(rollouts: Rollouts, table: NDArray[np.float64]) -> list[RolloutAcceptance]:
    """Like `score`, of a drafter with this table [R, K, L]."""
    lucky = np.stack([rollouts.luck[:, k : k + rollouts.longest] for k in range(DRAFT_TOKENS)], 1)
    offsets = np.arange(rollouts.longest)
    known = (offsets + np.arange(DRAFT_TOKENS)[:, None]) < rollouts.lengths[:, None, None]  # [R, K, L]
    probability, drawn = np.where(known, table, np.nan), np.where(known, lucky < table, np.nan)
    exists = offsets < rollouts.lengths[:, None]  # [R, L]
    rows, columns = np.nonzero(exists)
    start = StartAcceptance(
        torch.from_numpy(probability[rows, :, columns].T),
        torch.from_numpy(drawn[rows, :, columns].T),
        torch.from_numpy(rows),
        torch.from_numpy(columns),
    )
    return rollout_acceptances([start], DRAFT_TOKENS)


def serve(
    rollouts: Rollouts,
    skill: float,
    rng: np.random.Generator,
    own: float = 0.2,
    num_speculative_tokens: int = DRAFT_TOKENS,
) -> SpeculationCounts:
    """What an engine counts that generates these rollouts with a drafter."""
    table = acceptance_table(rollouts, skill, rng, own)
    num_drafts, accepted = 0, [0] * DRAFT_TOKENS
    for row, length in enumerate(rollouts.lengths):
        start = 0
        while start < length:
            num_drafts += 1
            k = 0
            while k < num_speculative_tokens and rollouts.luck[row, start + k] < table[row, k, start]:
                accepted[k] += 1
                k += 1
            start += 1 + k
    return counts(num_drafts, num_speculative_tokens, accepted)


def true_length(skill: float, own: float = 0.2) -> float:
    """What a drafter reaches on all rollouts of the policy."""
    rng = np.random.default_rng(1)
    scored = score(sample_rollouts(rng, 2000, 1), skill, rng, own)[-1]
    return 1 + float(scored.accepted.sum() / scored.steps.sum())
