"""Turn rollouts into micro-batches: which rank trains on which rollout, and which rollouts share a forward pass.

Worked example, prompt [7 8], response [4 5 6]. The model reads 7 8 4 5 (nothing is predicted from the last token), and
positions 1 2 3 predict 4 5 6:

    token_ids   7 8 4 5        predictors  1 2 3        targets  4 5 6
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cotrain.policy.shared_prompts import input_tokens, mask_of, positions_and_parts, rows_of
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
    shared: dict[str, Tensor] = field(default_factory=dict)
    """position_ids [B, L] int64 and attention_mask [B, 1, L, L] bool, if responses to a prompt share a row; see shared_prompts.py."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the policy's forward pass takes."""
        return {"token_ids": self.token_ids, "predictors": self.predictors, "targets": self.targets} | self.shared


def split_minibatches(rollouts: Sequence[ScoredRollout], count: int) -> list[list[ScoredRollout]]:
    """Split rollouts in order into `count` minibatches of sizes that differ by at most 1, whatever the number of ranks."""
    bounds = [len(rollouts) * index // count for index in range(count + 1)]
    return [list(rollouts[start:end]) for start, end in pairwise(bounds)]


def share_of_rank(minibatch: Sequence[ScoredRollout], rank: int, num_ranks: int) -> list[ScoredRollout]:
    """Sort rollouts by nonzero advantage and by length, and return every num_ranks-th, so that ranks get similar work."""
    by_work = sorted(minibatch, key=lambda scored: (scored.advantage != 0, input_tokens([scored])), reverse=True)
    return by_work[rank::num_ranks]


def micro_batches(
    rollouts: Sequence[ScoredRollout], micro_batch_tokens: int, device: torch.device, shares: bool = False
) -> list[MicroBatch]:
    """Sort rollouts by length into right-padded micro-batches of at most micro_batch_tokens positions, padding included.

    A rollout longer than that gets a micro-batch of its own. shares: let responses to a prompt share a row where that is less work.
    """
    rows = rows_of(rollouts, micro_batch_tokens) if shares else [[scored] for scored in rollouts]
    batches: list[list[list[ScoredRollout]]] = []
    positions = 0
    for row in sorted(rows, key=input_tokens, reverse=True):
        length = input_tokens(row)
        # Rows come longest first, so the first row of a batch sets its row length.
        added = input_tokens(batches[-1][0]) if batches else length
        if not batches or positions + added > micro_batch_tokens:
            batches.append([])
            positions, added = 0, length
        batches[-1].append(row)
        positions += added
    return [_micro_batch(batch, device) for batch in batches]


def empty_micro_batch(batch: MicroBatch, has_advantage: bool) -> MicroBatch:
    """Return a micro-batch of one position and no response tokens, so that its loss and gradient are 0.

    A rank that has run out of rollouts uses it to take part in a forward pass that all ranks make together, and with
    has_advantage in the backward pass too. batch: any other micro-batch.
    """
    nothing: dict[str, Any] = {name: value[:0] for name, value in vars(batch).items() if isinstance(value, Tensor)}
    nothing |= {"token_ids": batch.token_ids[:1, :1], "shared": {}}
    return replace(batch, **nothing | {"rollouts": [], "has_advantage": has_advantage})


def _micro_batch(rows: list[list[ScoredRollout]], device: torch.device) -> MicroBatch:
    texts = [[row[0].rollout.prompt_token_ids, *(s.rollout.token_ids[:-1] for s in row)] for row in rows]
    # Under causal attention no token sees the padding on its right, so rows of single rollouts need no mask.
    token_ids = pad_sequence([torch.tensor(list(chain(*row))) for row in texts], batch_first=True)
    shared = dict[str, Tensor]()
    if any(len(row) > 1 for row in rows):
        of_rows = [positions_and_parts(row) for row in rows]
        positions, parts = (pad_sequence([one[i] for one in of_rows], batch_first=True).to(device) for i in range(2))
        shared = {"position_ids": positions, "attention_mask": mask_of(parts)}
    rollouts = [scored for row in rows for scored in row]
    generated = [torch.tensor(scored.rollout.generated()) for scored in rollouts]
    lengths = torch.tensor([len(places) for places in generated])
    predictors = _predictors(rows, token_ids.shape[1], iter(generated))
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
        shared=shared,
    )


def _predictors(rows: list[list[ScoredRollout]], row_length: int, generated: Iterator[Tensor]) -> list[Tensor]:
    """Return where the generated tokens of each rollout are predicted: at the token before them, the first one at the prompt's last."""
    predictors = []
    for number, row in enumerate(rows):
        start = number * row_length + len(row[0].rollout.prompt_token_ids) - 1
        offset = 0
        for scored in row:
            places = next(generated)
            predictors.append(start + places + offset * (places > 0))
            offset += len(scored.rollout.token_ids) - 1
    return predictors


def _of_generated(values: Sequence[Sequence[Any]], generated: Sequence[Tensor]) -> Tensor:
    """Return the values of the tokens that the policy generated [N]. values: of each rollout's tokens. generated: their places."""
    return torch.cat([torch.tensor(row)[places] for row, places in zip(values, generated, strict=True)])
