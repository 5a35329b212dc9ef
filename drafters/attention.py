"""Attention of draft rows: the rows of a start see context rows of its rollout up to its own, and rows of the start's own.

Shape letters: S starts, B rows of a start, O rows of its own that it sees, C context rows of a rollout, D head size.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.alignment import Alignment

MAX_SCORES = 2**24
"""Most attention scores in memory at once, over all heads (64 MiB in float32)."""

KEPT_SCORES = 2**21
"""Most attention scores of a draft position that are kept for the backward pass; more are computed again."""


def attend(
    queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], alignment: Alignment, starts: slice,
    first_seen: Tensor, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Return the attention output [S, B, heads, D] for queries [S, B, heads, D] of the starts in the slice `starts`.

    context: keys and values [all context rows, kv heads, D], of which a start sees those of its rollout from first_seen [S] up to
    its own. own: keys and values [S, O, kv heads, D] of which it sees its own, or if causal each of its rows those up to its place.
    """
    chunks, heads = [], queries.shape[1:3].numel()
    keeps = len(queries) * heads * max((r.stop - r.start for r, _ in alignment.spans), default=0) <= KEPT_SCORES
    for rollout, own_starts in alignment.spans:
        keys, values = (tensor[rollout] for tensor in context)
        first, last = max(own_starts.start, starts.start), min(own_starts.stop, starts.stop)
        starts_in_chunk = max(MAX_SCORES // (len(keys) * heads), 1)
        for start in range(first, last, starts_in_chunk):
            stop = min(start + starts_in_chunk, last)
            rows = slice(start - starts.start, stop - starts.start)
            seen = torch.stack([first_seen[rows], alignment.starts_in_context[start:stop]]) - rollout.start
            of_rows = (tensor[rows] for tensor in own)
            chunks.append(run(keeps, _attend_chunk, queries[rows], keys, values, seen, *of_rows, causal))
    return torch.cat(chunks) if chunks else queries


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own_keys: Tensor, own_values: Tensor, causal: bool
) -> Tensor:
    """Return [S, B, heads, D]; start i sees keys [C, kv heads, D] from seen[0, i] to seen[1, i], and its own."""
    num_starts, num_rows, num_heads, size = queries.shape
    num_keys, kv_heads, _ = keys.shape
    # Queries that share a key head become rows of one matrix: [kv heads, S, B * heads / kv heads, D].
    grouped = queries.unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    scores = (grouped.flatten(1, 2) @ keys.permute(1, 2, 0)).view(kv_heads, num_starts, -1, num_keys)
    row = torch.arange(num_keys, device=keys.device)
    unseen = (row < seen[0, :, None]) | (row > seen[1, :, None])
    scores = scores.masked_fill(unseen[None, :, None], -torch.inf)
    own_scores = grouped @ own_keys.permute(2, 0, 3, 1)  # [kv heads, S, B * heads / kv heads, O]
    if causal:
        later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=keys.device).triu(1)
        own_scores = own_scores.masked_fill(later.repeat_interleave(num_heads // kv_heads, 0), -torch.inf)
    weights = (torch.cat([scores, own_scores], -1) * size**-0.5).softmax(-1)
    attended = (weights[..., :num_keys].flatten(1, 2) @ values.transpose(0, 1)).view_as(grouped)
    attended = attended + weights[..., num_keys:] @ own_values.permute(2, 0, 1, 3)
    return attended.unflatten(2, (num_rows, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)


def run(keeps, function, *args):
    """Call a function; unless it keeps its intermediate tensors, the backward pass computes them again."""
    return function(*args) if keeps else checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
