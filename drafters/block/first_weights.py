"""First weights of a block drafter, from the first batch: its masks begin with what the newest row says of the next one.

With random weights they begin with the average of the whole context, and learn for long to look at its end. So `fc` starts as the
ridge regression from the highest aux state of a row to the target's final state at the next row, and in the first layer the masks
attend to the newest rows, whose principal components values and outputs pass on. docs/measurements/block.md has what it brings.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.alignment import DraftBatch

RIDGE = 1.0
"""Weight of the penalty, in numbers of rows; columns have a mean square of 1."""

GAIN = 3.0
"""Gain of the norm of queries: how sharply the masks attend to the newest rows."""

MOST_ROWS = 2048
"""Rows that the regression and the components are computed from."""


@torch.no_grad()
def regression(states: Tensor, batch: DraftBatch) -> Tensor | None:
    """Return the matrix [H, H] from states [N, H] at a row to the target's final state at the next; None without such a pair."""
    of_both = batch.feature_mask[:-1] & batch.feature_mask[1:] & (batch.document_ids[:-1] == batch.document_ids[1:])
    rows = of_both.nonzero()[:MOST_ROWS, 0]
    if not len(rows):
        return None
    here, following = states[rows].float(), batch.final_hidden[rows + 1].float()
    penalty = RIDGE * len(rows) * torch.eye(here.shape[1], device=here.device)
    return torch.linalg.solve(here.T @ here + penalty, here.T @ following).T


@torch.no_grad()
def attend_to_newest(attention: Any, context: Tensor, mask: Tensor) -> None:
    """Let an attention's queries of the mask [H] prefer the newest rows of context [N, H], and pass on what these hold.

    Queries of the mask and keys of the mean context have one direction, whose product falls with the distance of their positions.
    """
    context, sizes = context[:MOST_ROWS].float(), attention.sizes
    for projection, source in ((attention.q_proj, mask.float()), (attention.k_proj, context.mean(0))):
        projection.weight.add_(source / source.square().sum().clamp(min=torch.finfo(source.dtype).tiny))
    attention.q_norm.weight.fill_(GAIN)
    components = torch.linalg.svd(context, full_matrices=False).Vh[: len(attention.v_proj.weight)]
    attention.v_proj.weight[: len(components)] = components.to(attention.v_proj.weight)
    sharing = sizes.num_attention_heads // sizes.num_key_value_heads  # query heads of a key head, which add up
    of_heads = attention.v_proj.weight.unflatten(0, (-1, sizes.head_dim)).repeat_interleave(sharing, 0)
    attention.o_proj.weight.copy_(of_heads.flatten(0, 1).T / sharing)
