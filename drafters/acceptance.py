"""Acceptance length: mean tokens emitted per verification step, the bonus token included.

Draft position k counts only when all positions before it were accepted, so the expected length is
1 + sum_k E[prod_{j<=k} alpha_j] with the product taken for each start before the mean: positions of one start are
correlated, and a product of means would understate it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def mean_acceptance(acceptance: Tensor) -> Tensor:
    """Mean acceptance probability of each draft position [K], given that it is reached.

    acceptance [K, S]: of draft position k from start s, NaN where unknown. A position is reached with the product of
    the acceptances before it, which is its weight. 0 for a position that is never reached.
    """
    known, reached, joint = _joint(acceptance)
    total = torch.where(known, reached, 0.0).sum(1)
    return torch.where(known, joint, 0.0).sum(1) / total.masked_fill(total == 0, 1.0)


def expected_acceptance_length(acceptance: Tensor) -> float:
    """1 + sum_k E[prod_{j<=k} acceptance_j] from acceptance [K, S], NaN where unknown.

    Each expectation is over the starts whose positions up to k are all known: a start three tokens before the end of
    its rollout tells nothing about position 5.
    """
    known, _, joint = _joint(acceptance)
    return 1.0 + float((torch.where(known, joint, 0.0).sum(1) / known.sum(1).clamp(min=1)).sum())


def acceptance_length(num_drafts: int, accepted_per_position: Sequence[int]) -> float:
    """1 + accepted / drafts, from an engine's counters over some interval; 1.0 when nothing was drafted.

    accepted_per_position[k]: verification steps in which draft position k and all before it were accepted.
    """
    return 1.0 + sum(accepted_per_position) / num_drafts if num_drafts else 1.0


def _joint(acceptance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[K, S] each: is position k known and all before it; probability that it is reached; that it is accepted."""
    known = acceptance.isfinite().int().cumprod(0).bool()
    joint = torch.where(known, acceptance, 0.0).double().cumprod(0)
    reached = torch.cat([torch.ones_like(joint[:1]), joint[:-1]])
    return known, reached, joint
