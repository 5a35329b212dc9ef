"""The map between the draft vocabulary (rows of the drafter's head) and the target's token ids.

target vocabulary     0  1  2  3  4  5  6          V = 7
draft_to_target       1  4  5                      V_draft = 3, ascending
d2t                   1  3  3                      offset: target id = draft id + d2t[draft id]
t2d                   .  x  .  .  x  x  .          is the target id in the draft vocabulary
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def choose_tokens(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Choose the target ids [size] of the draft vocabulary, ascending: `always`, then the most frequent of counts [V].

    Ties, and rows left over once all counted tokens are in, go to the lowest token ids.
    size is at most V. Raises ValueError when it leaves no room for `always`.
    """
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64, device=counts.device)
    if len(kept) > size:
        raise ValueError(f"draft_vocab_size {size} is below the {len(kept)} tokens that must be in it")
    rank = counts.to(torch.float64, copy=True)
    rank[kept] = torch.inf
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def to_maps(draft_to_target: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (d2t [V_draft] int64, t2d [V] bool) from ascending target ids [V_draft]."""
    d2t = draft_to_target - torch.arange(len(draft_to_target), device=draft_to_target.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=draft_to_target.device)
    t2d[draft_to_target] = True
    return d2t, t2d


def to_tokens(d2t: Tensor) -> Tensor:
    """Return target ids [V_draft] from offsets [V_draft]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def coverage(counts: Tensor, draft_to_target: Tensor) -> float:
    """Return the share of the counted tokens [V] that the draft vocabulary holds; 1.0 when nothing was counted."""
    total = counts.sum()
    return float(counts[draft_to_target].sum() / total) if total > 0 else 1.0
