"""Turn rollouts into micro-batches: which rank trains on which rollout, and which rollouts share a forward pass.

Worked example, prompt [7 8], response [4 5 6]. The model reads 7 8 4 5 (nothing is predicted from the last token), and
positions 1 2 3 predict 4 5 6:

    token_ids   7 8 4 5        predictors  1 2 3        targets  4 5 6
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cotrain.records import ScoredRollout


@dataclass(frozen=True)
class MicroBatch:
    """Rollouts of one forward pass: B rows of L tokens, holding S rollouts with N response tokens that the policy generated."""

    rollouts: list[ScoredRollout]
    token_ids: Tensor  # [B, L] int64
    predictors: Tensor  # [N] int64, the position that predicts each response token, as an index into the B*L positions
    targets: Tensor  # [N] int64, the response tokens
    sequence_ids: Tensor  # [N] int64, the rollout of each response token, 0 to S-1
    lengths: Tensor  # [S] int64, response tokens
    advantages: Tensor  # [N] float32
    behaviour_log_probs: Tensor  # [N] float32, from the engine
    old_log_probs: Tensor | None  # [N] float32, denominator of the importance ratio; None: the current policy
    versions: Tensor  # [N] int64, policy version that generated each response token
    has_advantage: bool  # whether any advantage differs from 0


def split_minibatches(rollouts: Sequence[ScoredRollout], count: int) -> list[list[ScoredRollout]]:
    """Split rollouts in order into `count` minibatches of sizes that differ by at most 1, whatever the number of ranks."""
    bounds = [len(rollouts) * index // count for index in range(count + 1)]
    return [list(rollouts[start:end]) for start, end in pairwise(bounds)]


def share_of_rank(minibatch: Sequence[ScoredRollout], rank: int, num_ranks: int) -> list[ScoredRollout]:
    """Sort rollouts by nonzero advantage and by length, and return every num_ranks-th, so that ranks get similar work."""
    by_work = sorted(minibatch, key=lambda scored: (scored.advantage != 0, num_input_tokens(scored)), reverse=True)
    return by_work[rank::num_ranks]


def num_input_tokens(scored: ScoredRollout) -> int:
    """Count the tokens that the model reads: prompt and response without the last token."""
    return len(scored.rollout.prompt_token_ids) + len(scored.rollout.token_ids) - 1


def micro_batches(rollouts: Sequence[ScoredRollout], micro_batch_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Sort rollouts by length into right-padded micro-batches of at most micro_batch_tokens positions, padding included.

    A rollout longer than that gets a micro-batch of its own.
    """
    batches: list[list[ScoredRollout]] = []
    positions = 0
    for scored in sorted(rollouts, key=num_input_tokens, reverse=True):
        length = num_input_tokens(scored)
        # Rollouts come longest first, so the first rollout of a batch sets its row length.
        added = num_input_tokens(batches[-1][0]) if batches else length
        if not batches or positions + added > micro_batch_tokens:
            batches.append([])
            positions, added = 0, length
        batches[-1].append(scored)
        positions += added
    return [_micro_batch(batch, device) for batch in batches]


def empty_micro_batch(batch: MicroBatch, has_advantage: bool) -> MicroBatch:
    """Return a micro-batch of one position and no response tokens, so that its loss and gradient are 0.

    A rank that has run out of rollouts uses it to take part in a forward pass that all ranks make together, and with
    has_advantage in the backward pass too. batch: any other micro-batch.
    """
    nothing: dict[str, Any] = {name: value[:0] for name, value in vars(batch).items() if isinstance(value, Tensor)}
    nothing["token_ids"] = batch.token_ids[:1, :1]
    return replace(batch, **nothing | {"rollouts": [], "has_advantage": has_advantage})


def _micro_batch(rollouts: list[ScoredRollout], device: torch.device) -> MicroBatch:
    rows = [torch.tensor(s.rollout.prompt_token_ids + s.rollout.token_ids[:-1]) for s in rollouts]
    # Under causal attention no token sees the padding on its right, so no mask is needed.
    token_ids = pad_sequence(rows, batch_first=True)
    starts = range(0, token_ids.numel(), token_ids.shape[1])
    generated = [torch.tensor(scored.rollout.generated()) for scored in rollouts]
    lengths = torch.tensor([len(places) for places in generated])
    # A token is predicted at the position before it.
    firsts = [start + len(s.rollout.prompt_token_ids) - 1 for start, s in zip(starts, rollouts, strict=True)]
    predictors = [first + places for first, places in zip(firsts, generated, strict=True)]
    advantages = torch.tensor([scored.advantage for scored in rollouts], dtype=torch.float32)
    behaviour = _of_generated([s.rollout.log_probs for s in rollouts], generated).to(device)
    versions = [[s.versions.policy for s in r.rollout.segments for _ in range(*s[1:])] for r in rollouts]
    return MicroBatch(
        rollouts=rollouts,
        token_ids=token_ids.to(device),
        predictors=torch.cat(predictors).to(device),
        targets=_of_generated([s.rollout.token_ids for s in rollouts], generated).to(device),
        sequence_ids=torch.arange(len(rollouts)).repeat_interleave(lengths).to(device),
        lengths=lengths.to(device),
        advantages=advantages.repeat_interleave(lengths).to(device),
        behaviour_log_probs=behaviour,
        old_log_probs=behaviour,
        versions=_of_generated(versions, generated),
        has_advantage=any(scored.advantage != 0 for scored in rollouts),
    )


def _of_generated(values: Sequence[Sequence[Any]], generated: Sequence[Tensor]) -> Tensor:
    """Return the values of the tokens that the policy generated [N]. values: of each rollout's tokens. generated: their places."""
    return torch.cat([torch.tensor(row)[places] for row, places in zip(values, generated, strict=True)])
