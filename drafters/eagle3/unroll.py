"""Training-time test: run the drafter over all starts at once, several draft positions deep, as serving will.

At draft position k each start's query sees the keys of draft position 0 up to its own row, and of each later
position only its own key: when serving, those are the entries that its verification step has put into the KV cache.
That is a causal block and k scores a row, never a mask of rows x rows(1 + k).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafters.alignment import Alignment
from drafters.base import DraftBatch
from drafters.eagle3.layer import DecoderLayer

MAX_SCORES = 2**24
"""Attention scores in memory at once, over all heads (64 MiB in float32)."""


def unroll(
    fuse: Callable[[Tensor], Tensor],
    layer: DecoderLayer,
    norm: nn.RMSNorm,
    batch: DraftBatch,
    alignment: Alignment,
    embedding: Tensor,
) -> list[Tensor]:
    """States [S, H] that the head reads for each start, one tensor for each draft position.

    fuse: aux hidden states [R, A*H] -> first hidden state [R, H]. The true tokens are fed at every position (teacher forcing); the hidden state fed back is the layer's own output
    before the final norm.
    """

    def embed(rows: Tensor) -> Tensor:
        return embedding[batch.token_ids[rows]].to(norm.weight.dtype)

    def first(aux_hidden: Tensor) -> tuple[Tensor, ...]:
        x, residual = layer.attention_input(embed(alignment.context_rows + 1), fuse(aux_hidden))
        keys, values = layer.self_attn.keys_and_values(x, batch.positions[alignment.context_rows])
        x, residual = x[alignment.starts_in_context], residual[alignment.starts_in_context]
        queries = layer.self_attn.queries(x, start_positions)
        hidden = layer.finish(attend(queries, keys, values, [], [], alignment), residual)
        return hidden, norm(hidden), keys, values

    def later(position: int, hidden: Tensor, context: tuple[Tensor, Tensor], *own: Tensor) -> tuple[Tensor, ...]:
        x, residual = layer.attention_input(embed(alignment.input_rows(position)), hidden)
        key, value = layer.self_attn.keys_and_values(x, start_positions + position)
        queries = layer.self_attn.queries(x, start_positions + position)
        attended = attend(queries, *context, [*own[::2], key], [*own[1::2], value], alignment)
        hidden = layer.finish(attended, residual)
        return hidden, norm(hidden), key, value

    start_positions = batch.positions[alignment.start_rows]
    hidden, normed, *context = _recomputed(first, batch.aux_hidden[alignment.context_rows].to(norm.weight.dtype))
    outputs: list[Tensor] = [normed]
    own: list[Tensor] = []
    for position in range(1, len(alignment.supervised)):
        hidden, normed, key, value = _recomputed(later, position, hidden, context, *own)
        own += [key, value]
        outputs.append(normed)
    return outputs


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    alignment: Alignment,
) -> Tensor:
    """Attention output [S, heads, D] of the starts' queries [S, heads, D].

    keys and values [C, kv heads, D] of the context rows are seen causally within the rollout; own_keys and own_values,
    each [S, kv heads, D], only by their own start.
    """
    chunks = []
    for document in alignment.documents:
        begin, end = document.context.start, document.context.stop
        rows_in_chunk = max(MAX_SCORES // ((end - begin) * queries.shape[1]), 1)
        for start in range(document.starts.start, document.starts.stop, rows_in_chunk):
            rows = slice(start, min(start + rows_in_chunk, document.starts.stop))
            last_seen = alignment.starts_in_context[rows] - begin
            chunks.append(
                _recomputed(
                    _attend_chunk,
                    queries[rows],
                    keys[begin:end],
                    values[begin:end],
                    last_seen,
                    [key[rows] for key in own_keys],
                    [value[rows] for value in own_values],
                )
            )
    return torch.cat(chunks) if chunks else queries


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, last_seen: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """[R, heads, D] from queries [R, heads, D]; row i sees keys [C, kv heads, D] up to last_seen[i], and its own."""
    num_rows, num_heads, size = queries.shape
    kv_heads = keys.shape[1]
    # Queries that share a key head become rows of one matrix: [kv heads, R * heads / kv heads, D].
    grouped = queries.view(num_rows, kv_heads, -1, size).transpose(0, 1)
    scores = (grouped.flatten(1, 2) @ keys.permute(1, 2, 0)).view(kv_heads, num_rows, num_heads // kv_heads, -1)
    unseen = torch.arange(keys.shape[0], device=keys.device) > last_seen[:, None]
    scores = scores.masked_fill(unseen[None, :, None], -torch.inf)
    own_scores = [(grouped * key.transpose(0, 1)[:, :, None]).sum(-1, keepdim=True) for key in own_keys]
    weights = (torch.cat([scores, *own_scores], dim=-1) * size**-0.5).softmax(-1)
    attended = (weights[..., : keys.shape[0]].flatten(1, 2) @ values.transpose(0, 1)).view_as(grouped)
    for index, value in enumerate(own_values):
        attended = attended + weights[..., keys.shape[0] + index, None] * value.transpose(0, 1)[:, :, None]
    return attended.transpose(0, 1).reshape(num_rows, num_heads, size)


def _recomputed(function, *args):
    """Call a function whose intermediate tensors are not kept but computed again in the backward pass."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
