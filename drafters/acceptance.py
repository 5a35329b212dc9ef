"""Acceptance length: mean tokens emitted per verification step, the bonus token included.

It is not a mean over all positions of a text (docs/guide/drafters.md). Draft tokens 1 to k of a start were all accepted with
probability prod_{j<=k} a_j. For the tokens x that the rollout continues with, a_j = min(1, q_j(x_j) / p_j(x_j)), or with greedy
drafts 1 if x_j is the drafter's likeliest token and else 0. Each start counts with the probability v that a verification step
begins there: v(0) = 1, and start s adds to v(s + 1 + a) its v(s) times the probability that exactly a draft tokens are accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.scores import RolloutAcceptance


@dataclass(frozen=True)
class StartAcceptance:
    """Acceptance at S starts of some rollouts and K draft positions; NaN where it is not known.

    It is 0 behind an end-of-sequence token, where an engine still drafts but accepts nothing.
    """

    probability: Tensor  # [K, S] probability that a draft token is accepted, whatever the target draws
    drawn: Tensor  # [K, S] probability that the token that the rollout drew was an accepted draft
    rollout: Tensor  # [S] int64; of a rollout with several turns, each turn has a number of its own
    offset: Tensor  # [S] int64, generated tokens before the start's first input; negative: no step begins here


def rollout_acceptance(starts: Sequence[StartAcceptance], num_speculative_tokens: int) -> RolloutAcceptance:
    """Return one row for each rollout, in the order of `starts`. Each element of `starts` numbers its rollouts from 0.

    Where an acceptance is unknown, for example beyond a rollout's length limit, it is replaced by the mean of its draft
    position over all rollouts. num_speculative_tokens is at most K.
    """
    counts = [int(part.rollout.max()) + 1 if len(part.rollout) else 0 for part in starts]
    steps = torch.full((sum(counts),), torch.nan, dtype=torch.float64)
    accepted = steps[:, None].repeat(1, num_speculative_tokens)
    known = torch.zeros(sum(counts), dtype=torch.int64)
    if sum(counts):
        tables, exists = _by_rollout(starts, counts, num_speculative_tokens)
        # A rollout has no hole if its offsets start at 0 without a gap and all have a known acceptance at the first position.
        whole = exists.any(1) & (exists == exists.cummin(1).values).all(1)
        whole &= (tables[0, :, 0].isfinite() | ~exists).all(1)
        known[whole] = tables[:, whole].isfinite().sum((0, 2, 3))
        probability, drawn = (_without_unknown(table, exists[whole]) for table in tables[:, whole])
        all_before = torch.cat([torch.ones_like(drawn[:, :1]), drawn.cumprod(1)], dim=1)  # [R, k+1, L]
        begun = _visits(all_before, exists[whole])
        steps[whole], accepted[whole] = begun.sum(1), (begun[:, None] * all_before[:, :-1] * probability).sum(2)
    return RolloutAcceptance(steps.numpy(), accepted.numpy(), known.numpy())


def rollout_acceptances(starts: Sequence[StartAcceptance], most: int) -> list[RolloutAcceptance]:
    """Call `rollout_acceptance` for each draft length 1 to `most`, which decides where verification steps begin."""
    return [rollout_acceptance(starts, k) for k in range(1, most + 1)]


def _by_rollout(
    starts: Sequence[StartAcceptance], counts: Sequence[int], num_speculative_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return `probability` and `drawn` by rollout and offset [2, R, k, L], and which starts exist [R, L]."""
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    rollout = torch.cat([part.rollout + first for part, first in zip(starts, firsts, strict=True)]).cpu()
    offset = torch.cat([part.offset for part in starts]).cpu()
    both = torch.cat([torch.stack([part.probability, part.drawn]) for part in starts], dim=2)
    begins = offset >= 0
    place = rollout[begins], offset[begins]
    exists = torch.zeros(sum(counts), int(offset.max()) + 1, dtype=torch.bool)
    exists[place] = True
    tables = torch.full((2, num_speculative_tokens, *exists.shape), torch.nan, dtype=torch.float64)
    tables[:, :, *place] = both[:, :num_speculative_tokens].double().cpu()[:, :, begins]
    return tables.transpose(1, 2), exists


def _without_unknown(table: Tensor, exists: Tensor) -> Tensor:
    """Return [R, k, L] with unknown values replaced by the mean of their draft position, and 0 where there is no start."""
    known = table.isfinite() & exists[:, None]
    filled = torch.where(known, table, 0.0)
    means = filled.sum((0, 2)) / known.sum((0, 2)).clamp(min=1)
    return torch.where(known, table, means[None, :, None]) * exists[:, None]


def _visits(all_before: Tensor, exists: Tensor) -> Tensor:
    """Return [R, L], the probability that a verification step begins at each start."""
    num_rollouts, positions, length = all_before.shape
    exactly = all_before - torch.cat([all_before[:, 1:], torch.zeros_like(all_before[:, :1])], dim=1)
    visits = torch.zeros(num_rollouts, length + positions, dtype=all_before.dtype)
    visits[:, 0] = 1.0
    for start in range(length):
        visits[:, start + 1 : start + 1 + positions] += visits[:, start, None] * exactly[:, :, start]
    return visits[:, :length] * exists
