"""The one place that shifts tokens, features and targets against each other.

Row t of a batch belongs to token x_t; its features g_t are those of the target after it read x_t. From start row t the
drafter is fed g_t and the token x_{t+1} that the target sampled from them, and proposes x_{t+2}. Draft position k
(0-based) is fed x_{t+1+k}, predicts x_{t+2+k}, and is compared with the target's distribution at row t+1+k.

One rollout "The cat sat on a mat", prompt "The cat", the last token without features:

    row t                    0     1     2     3     4     5
    token x_t                The   cat   sat   on    a     mat
    response_mask            .     .     x     x     x     x
    feature_mask             x     x     x     x     x     .

    draft position 0:  input x_{t+1}, target row t+1, predicts x_{t+2}
    input                    cat   sat   on    a     mat   -
    target row               1     2     3     4     -     -       row 5 has no features
    predicts                 sat   on    a     mat   -     -
    draft position 1:  input x_{t+2}, target row t+2, predicts x_{t+3}
    input                    sat   on    a     mat   -     -
    target row               2     3     4     -     -     -
    predicts                 on    a     mat   -     -     -

Every row with features and a next token (0 to 4) is context: later rows of its rollout attend to it. Rows without features are
neither context nor start nor target. Rows 0 to 3 are starts, because they are supervised at some draft position. RoPE positions
are the target's: t at draft position 0, t+k at draft position k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ANCHOR_RUN = 16  # starts that are drawn together


@dataclass(frozen=True)
class DraftBatch:
    """Whole rollouts packed one after the other. Row t has token t and the target's features after it read tokens up to t."""

    token_ids: Tensor  # [N] int64
    aux_hidden: Tensor  # [N, A*H], layers ascending
    final_hidden: Tensor  # [N, H], after the target's final norm: head @ final_hidden = logits of token t+1
    feature_mask: Tensor  # [N] bool, False where the engine has no hidden state (holes, each rollout's last token)
    response_mask: Tensor  # [N] bool, True where token t was generated (not part of the prompt)
    positions: Tensor  # [N] int64, position within its rollout
    document_ids: Tensor  # [N] int64, which rollout
    policy_version: int  # of the policy that computed the features
    log_probs: Tensor | None = None  # [N] of tokens t as this policy sampled them, NaN for others

    def to(self, device: str | torch.device) -> "DraftBatch":
        """Return the batch on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class Alignment:
    """Rows that enter the drafter and rows they are compared with: C context rows, S start rows, K draft positions."""

    context_rows: Tensor  # [C] ascending batch rows
    start_rows: Tensor  # [S] ascending batch rows
    starts_in_context: Tensor  # [S] start_rows == context_rows[starts_in_context]
    supervised: Tensor  # [K, S] bool, all False beyond the end of the rollout
    spans: tuple[tuple[slice, slice], ...]  # context rows and start rows of each rollout that has a start
    num_rows: int  # N

    def input_rows(self, position: int) -> Tensor:
        """Return the batch rows [S] of the token that each start is fed at a draft position.

        A start too near the end of the batch gets the batch's last row; it is not supervised at that position.
        """
        return (self.start_rows + 1 + position).clamp(max=self.num_rows - 1)

    def of_context(self, batch: DraftBatch) -> "Alignment":
        """Return the same alignment with every context row as a start."""
        rows = self.context_rows
        spans = _spans(batch.document_ids[rows], torch.ones_like(rows, dtype=torch.bool))
        at = torch.arange(len(rows), device=rows.device)
        return replace(self, start_rows=rows, starts_in_context=at, spans=spans)

    def target_rows(self, position: int) -> Tensor:
        """Return the ascending batch rows of the target's distributions, for starts supervised at a draft position."""
        return self.start_rows[self.supervised[position]] + 1 + position


def align(batch: DraftBatch, depth: int, share: float = 1.0, generator: torch.Generator | None = None) -> Alignment:
    """Find the context rows, the starts and the supervised draft positions of a batch, for `depth` draft positions.

    With a generator and a share below 1, only this share of the starts is taken, at random but at least one.
    """
    ids, rows = batch.document_ids, torch.arange(len(batch.token_ids), device=batch.token_ids.device)
    context = batch.feature_mask & (ids == _ahead(ids, 1, -1))
    has_target = [_ahead(batch.feature_mask, k + 1, False) for k in range(depth)]
    turns = turn_ids(batch)
    first = _ahead(turns, 1, -1)  # turn of the first input
    is_predicted = [
        (first == _ahead(turns, k + 2, -1)) & _ahead(batch.response_mask, k + 2, False) for k in range(depth)
    ]
    supervised = context & torch.stack(has_target) & torch.stack(is_predicted)
    context_rows, start_rows = rows[context], rows[supervised.any(0)]
    if share < 1 and generator is not None and len(start_rows):
        start_rows = start_rows[_drawn_in_runs(len(start_rows), share, generator).to(rows.device)]
    return Alignment(
        context_rows=context_rows,
        start_rows=start_rows,
        starts_in_context=torch.searchsorted(context_rows, start_rows),
        supervised=supervised[:, start_rows],
        spans=_spans(ids[context_rows], torch.isin(context_rows, start_rows)),
        num_rows=len(rows),
    )


def _drawn_in_runs(num_starts: int, share: float, generator: torch.Generator) -> Tensor:
    """Return the ascending numbers of a random share of the starts, at least one, in runs of starts that follow one another.

    Starts of a run share their target rows: k draft positions after a run of n starts need n + k - 1 of the target's
    distributions and not up to n k, and these are a large part of what an update costs (docs/measurements/block.md).
    """
    wanted = max(1, round(share * num_starts))
    runs = torch.arange(num_starts).split(min(ANCHOR_RUN, wanted))
    order = torch.randperm(len(runs), generator=generator).tolist()
    return torch.cat([runs[i] for i in order])[:wanted].sort().values


def turn_ids(batch: DraftBatch) -> Tensor:
    """Return [N] the turn of each row, counted over the whole batch. What is read before a turn, prompt or observed, belongs to it.

    No verification step goes on after the end of a turn, and no draft is compared with a token of the next one.
    """
    ids, generated = batch.document_ids, batch.response_mask
    ends = (ids[1:] != ids[:-1]) | (generated[:-1] & ~generated[1:])
    return torch.cat([ends.new_zeros(1, dtype=torch.int64), ends.cumsum(0)])


def generated_before(batch: DraftBatch, start_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the turn of each start row t [S], and how many tokens of it were generated before the first input x_{t+1} [S];
    negative if x_{t+1} was not generated.

    Every verification step begins with a generated token as its first input; the first generated token of a turn has offset 0.
    """
    turns, rows = turn_ids(batch), torch.arange(len(batch.token_ids), device=batch.token_ids.device)
    first = rows.new_full((len(rows),), len(rows)).scatter_reduce(
        0, turns[batch.response_mask], rows[batch.response_mask], "amin"
    )
    return turns[start_rows + 1], start_rows + 1 - first[turns[start_rows + 1]]


def beyond_stop(batch: DraftBatch, start_rows: Tensor, depth: int, eos_token_ids: Sequence[int]) -> Tensor:
    """Return [K, S] bool: whether draft position k of a start lies behind the end-of-sequence token of its turn.

    False for turns that end otherwise, for example at a length limit, because their text would continue there.
    """
    turns = turn_ids(batch)
    last = turns.bincount().cumsum(0) - 1
    stops = torch.isin(batch.token_ids[last], torch.tensor(eos_token_ids, device=last.device))
    of_start = turns[start_rows + 1]
    predicted = start_rows + 2 + torch.arange(depth, device=last.device)[:, None]
    return (predicted > last[of_start]) & stops[of_start]


def _ahead(values: Tensor, distance: int, beyond: int) -> Tensor:
    """Return [N], for each row the value `distance` rows ahead, or `beyond` where the batch has no such row."""
    return torch.cat([values[distance:], values.new_full((min(distance, len(values)),), beyond)])


def _spans(document_ids: Tensor, is_start: Tensor) -> tuple[tuple[slice, slice], ...]:
    """Return `Alignment.spans` from the rollout [C] and the start flag [C] of each context row."""
    _, document, lengths = document_ids.unique_consecutive(return_inverse=True, return_counts=True)
    num_starts = torch.zeros_like(lengths).index_add_(0, document, is_start.to(lengths.dtype))
    context, starts = (pairwise([0, *counts.cumsum(0).tolist()]) for counts in (lengths, num_starts))
    return tuple((slice(*c), slice(*s)) for c, s in zip(context, starts, strict=True) if s[0] < s[1])
