"""Turn rollouts into micro-batches: which rank trains on which rollout, and which rollouts share a forward pass.

Worked example, prompt [7 8], response [4 5 6]. The model reads 7 8 4 5 (nothing is predicted from the last token), and
positions 1 2 3 predict 4 5 6:

    token_ids   7 8 4 5        predictors  1 2 3        targets  4 5 6
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cotrain.records import ScoredRollout


@dataclass(frozen=True)
class MicroBatch:
    """Rollouts of one forward pass: B rows of L tokens, one rollout each, with N response tokens in all."""

    rollouts: list[ScoredRollout]
    token_ids: Tensor  # [B, L] int64, padded on the right, which no token sees under causal attention
    predictors: Tensor  # [N] int64, the position that predicts each response token, as an index into the B*L positions
    targets: Tensor  # [N] int64, the response tokens
    advantages: Tensor  # [N] float32
    behaviour_log_probs: Tensor  # [N] float32, from the engine
    versions: Tensor  # [N] int64, policy version that generated each response token
    has_advantage: bool  # whether any advantage differs from 0


def share_of_rank(rollouts: Sequence[ScoredRollout], rank: int, num_ranks: int) -> list[ScoredRollout]:
    """Sort rollouts by nonzero advantage and by length, and return every num_ranks-th, so that ranks get similar work."""
    by_work = sorted(rollouts, key=lambda scored: (scored.advantage != 0, num_input_tokens(scored)), reverse=True)
    return by_work[rank::num_ranks]


def num_input_tokens(scored: ScoredRollout) -> int:
    """Count the tokens that the model reads: prompt and response without the last token."""
    return len(scored.rollout.prompt_token_ids) + len(scored.rollout.token_ids) - 1


def micro_batches(rollouts: Sequence[ScoredRollout], micro_batch_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Sort rollouts by length into micro-batches of at most micro_batch_tokens positions, padding included.

    A rollout longer than that gets a micro-batch of its own.
    """
    batches: list[list[ScoredRollout]] = []
    for scored in sorted(rollouts, key=num_input_tokens, reverse=True):
        # The longest rollout of a batch comes first and sets its row length.
        if not batches or num_input_tokens(batches[-1][0]) * (len(batches[-1]) + 1) > micro_batch_tokens:
            batches.append([])
        batches[-1].append(scored)
    return [_micro_batch(batch, device) for batch in batches]


def empty_micro_batch(batch: MicroBatch, has_advantage: bool) -> MicroBatch:
    """Return a micro-batch of one position and no response tokens, so that its loss and gradient are 0.

    A rank that has run out of rollouts uses it to take part in a forward pass that all ranks make together, and with
    has_advantage in the backward pass too. batch: any other micro-batch.
    """
    tokens = ("predictors", "targets", "advantages", "behaviour_log_probs", "versions")
    none = {name: getattr(batch, name)[:0] for name in tokens}
    return replace(batch, rollouts=[], token_ids=batch.token_ids[:1, :1], has_advantage=has_advantage, **none)


def _micro_batch(scored: list[ScoredRollout], device: torch.device) -> MicroBatch:
    rollouts, advantages = [one.rollout for one in scored], [one.advantage for one in scored]
    token_ids = pad_sequence([torch.tensor(r.prompt_token_ids + r.token_ids[:-1]) for r in rollouts], batch_first=True)
    predictors = []
    for row, rollout in enumerate(rollouts):
        first = row * token_ids.shape[1] + len(rollout.prompt_token_ids) - 1
        predictors.append(torch.arange(first, first + len(rollout.token_ids)))
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    return MicroBatch(
        rollouts=scored,
        token_ids=token_ids.to(device),
        predictors=torch.cat(predictors).to(device),
        targets=torch.tensor([token for rollout in rollouts for token in rollout.token_ids]).to(device),
        advantages=torch.tensor(advantages, dtype=torch.float32).repeat_interleave(lengths).to(device),
        behaviour_log_probs=torch.tensor([value for rollout in rollouts for value in rollout.log_probs]).to(device),
        versions=torch.tensor([s.versions.policy for r in rollouts for s in r.segments for _ in range(*s[1:])]),
        has_advantage=any(advantage != 0 for advantage in advantages),
    )
