"""The draft vocabulary: the tokens of the target's that a drafter can propose."""

from collections.abc import Sequence

import torch
from torch import Tensor


def choose_tokens(counts: Tensor, size: int, always: Sequence[int] = (), never: Sequence[int] = ()) -> Tensor:
    """Choose the target ids [size] of the draft vocabulary, ascending: `always`, then the most frequent of counts [V].

    Ties, and places left over once all counted tokens are in, go to the lowest token ids, and to those in `never` last.
    size is at most V. Raises ValueError when it leaves no room for `always`.
    """
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64, device=counts.device)
    if len(kept) > size:
        raise ValueError(f"draft_vocab_size {size} is below the {len(kept)} tokens that must be in it")
    rank = counts.to(torch.float64, copy=True)
    rank[list(never)] = -1
    rank[kept] = torch.inf
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def to_maps(draft_to_target: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (d2t [V_draft] int64, t2d [V] bool) from ascending target ids [V_draft].

    target id = draft id + d2t[draft id]; t2d says for each target id whether it is in the draft vocabulary.
    """
    d2t = draft_to_target - torch.arange(len(draft_to_target), device=draft_to_target.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=draft_to_target.device)
    t2d[draft_to_target] = True
    return d2t, t2d


def to_tokens(d2t: Tensor) -> Tensor:
    """Return target ids [V_draft] from offsets [V_draft]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
