"""Attention of whole blocks: the rows of a start's block see its context up to the start's own row, and each other.

Shape letters: S starts, B rows of a block, C context rows of a rollout, D head size.
"""

import torch
from torch import Tensor

from drafters.alignment import Alignment
from drafters.unroll import MAX_SCORES, recomputed


def attend_blocks(
    queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], alignment: Alignment, causal: bool
) -> Tensor:
    """Return the attention output [S, B, heads, D] for queries [S, B, heads, D].

    context: keys and values [all context rows, kv heads, D]. own: those of the blocks themselves [S, B, kv heads, D], of which a row
    sees all, or if causal those up to its own.
    """
    chunks = []
    for seen, starts in alignment.spans:
        keys, values = (tensor[seen] for tensor in context)
        starts_in_chunk = max(MAX_SCORES // (len(keys) * queries[0].shape[:2].numel()), 1)
        for first in range(starts.start, starts.stop, starts_in_chunk):
            of = slice(first, min(first + starts_in_chunk, starts.stop))
            last_seen = alignment.starts_in_context[of] - seen.start
            chunks.append(
                recomputed(_attend_chunk, queries[of], keys, values, *(t[of] for t in own), last_seen, causal)
            )
    return torch.cat(chunks) if chunks else queries


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, last_seen: Tensor, causal: bool
) -> Tensor:
    """Return [S, B, heads, D]; start i sees keys [C, kv heads, D] up to last_seen[i], and its own block."""
    num_starts, num_rows, num_heads, size = queries.shape
    num_keys, kv_heads, _ = keys.shape
    # Queries that share a key head become rows of one matrix: [kv heads, S, B * heads / kv heads, D].
    grouped = queries.unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    scores = (grouped.flatten(1, 2) @ keys.permute(1, 2, 0)).view(kv_heads, num_starts, -1, num_keys)
    unseen = torch.arange(num_keys, device=keys.device) > last_seen[:, None]
    scores = scores.masked_fill(unseen[None, :, None], -torch.inf)
    own_scores = grouped @ own_keys.permute(2, 0, 3, 1)  # [kv heads, S, B * heads / kv heads, B]
    if causal:
        later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=keys.device).triu(1)
        own_scores = own_scores.masked_fill(later.repeat_interleave(num_heads // kv_heads, 0), -torch.inf)
    weights = (torch.cat([scores, own_scores], -1) * size**-0.5).softmax(-1)
    attended = (weights[..., :num_keys].flatten(1, 2) @ values.transpose(0, 1)).view_as(grouped)
    attended = attended + weights[..., num_keys:] @ own_values.permute(2, 0, 1, 3)
    return attended.unflatten(2, (num_rows, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
