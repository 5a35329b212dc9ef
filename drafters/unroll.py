"""Decoder layers on packed rows, unrolled from all starts at once over several draft positions, as in serving.

At draft position k, a start's query sees the keys of draft position 0 up to its own row, and only its own key of each later
position. In serving, these are the entries that its verification step has put into the KV cache. So a row needs a causal block
and k more scores, never a mask of rows x rows(1 + k). A sliding window of W tokens leaves the newest W of these keys. Shape
letters: R rows, H hidden size, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.alignment import Alignment, DraftBatch
from drafters.attention import attend, run
from drafters.target import TargetSpec

BY_LENGTH = ("dynamic", "longrope")
"""Rotations that transformers changes with the length of a sequence and vLLM with that of the engine's longest."""


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight, as in Qwen3-Next."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class Attention(nn.Module):
    """Projections of grouped-query attention over inputs of any width.

    gated: each head's output is multiplied by the sigmoid of a gate, whose weights follow those of the head's query in q_proj
    (Qwen3-Next). norm: the class of the norms that each head's query and key pass, if any.
    """

    def __init__(
        self, sizes: TargetSpec, input_size: int, output_bias: bool = False, gated: bool = False,
        norm: Callable[[int, float], nn.Module] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        heads, size, bias = sizes.num_attention_heads, sizes.head_dim, sizes.attention_bias
        self.sizes, self.gated = sizes, gated
        self.q_proj = nn.Linear(input_size, heads * size * (1 + gated), bias=bias)
        self.k_proj = nn.Linear(input_size, sizes.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, sizes.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, sizes.hidden_size, bias=output_bias)
        self.angles, self.factor = inverse_frequencies(sizes)  # no buffer: always float32, and in no checkpoint
        self.q_norm, self.k_norm = (norm(size, sizes.rms_norm_eps) if norm else nn.Identity() for _ in range(2))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the queries [R, heads, D] with rotary embeddings of positions [R]."""
        queries = F.linear(x, self._query_rows(0)) if self.gated else self.q_proj(x)
        queries = queries.unflatten(-1, (-1, self.sizes.head_dim))
        return self._rotate(self.q_norm(queries), positions)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, kv heads, D]; the keys have rotary embeddings of positions [R]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.sizes.head_dim))
        keys = self._rotate(self.k_norm(keys), positions)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.sizes.head_dim))

    def output(self, attended: Tensor, x: Tensor) -> Tensor:
        """Project what each row's heads attended to [R, heads, D] to [R, H]; gates read the attention's input x [R, width]."""
        attended = attended.flatten(1)
        if self.gated:
            attended = attended * F.linear(x, self._query_rows(1)).sigmoid()
        return self.o_proj(attended)

    def _query_rows(self, part: int) -> Tensor:
        """Return the weights of the queries (0) or of the gates (1), which alternate head by head in q_proj."""
        return self.q_proj.weight.unflatten(0, (-1, 2, self.sizes.head_dim))[:, part].flatten(0, 1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first `size` dimensions of each head, i with i + size / 2 (the neox layout); the others do not change."""
        self.angles = self.angles.to(x.device)
        size, angles = 2 * len(self.angles), (positions[:, None].float() * self.angles)[:, None]
        cos, sin = ((self.factor * wave).to(x.dtype) for wave in (angles.cos(), angles.sin()))
        first, second = x[..., :size].chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., size:]], dim=-1)


def inverse_frequencies(sizes: TargetSpec) -> tuple[Tensor, float]:
    """Return the angles [rotated dimensions / 2] of one position, on the CPU in float32, and the factor on cos and sin.

    They are those of transformers and vLLM. Raises ValueError naming the rope_type when it is none that can be trained, or its
    parameters are wrong.
    """
    rope, kind = sizes.rope_parameters, sizes.rope_parameters["rope_type"]
    if kind in BY_LENGTH:
        raise ValueError(f"rope_type {kind!r} follows the length of the sequence, which is not supported")
    with torch.device("cpu"):
        if kind == "default":  # transformers has no function for it
            size = int(sizes.head_dim * rope.get("partial_rotary_factor", 1.0))
            return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        head: dict[str, int] = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
        head |= dict.fromkeys(("hidden_size", "head_dim"), sizes.head_dim)
        try:
            config = LlamaConfig(
                **head, max_position_embeddings=sizes.max_position_embeddings, rope_parameters=dict(rope)
            )
            return ROPE_INIT_FUNCTIONS[kind](config, None)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"rope_parameters {rope} cannot be computed: {error}") from error


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A decoder layer, split into the parts before and after attention. Subclasses also read embeddings."""

    def __init__(
        self, attention: Attention, norm: Callable[[int, float], nn.Module] = nn.RMSNorm, mlp: nn.Module | None = None
    ) -> None:
        """norm: the class of the layer's norms. mlp: in place of SwiGLU."""
        super().__init__()
        sizes = attention.sizes
        self.input_layernorm = norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes.hidden_size, sizes.intermediate_size) if mlp is None else mlp

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input [R, width] of the query, key and value projections, and the residual [R, H]."""
        return self.input_layernorm(hidden), hidden

    def finish(self, attended: Tensor, residual: Tensor, x: Tensor) -> Tensor:
        """Return the output [R, H] before the final norm, from what each row's heads attended to [R, heads, D]."""
        hidden = residual + self.self_attn.output(attended, x)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


WHOLE_TEXT = 2**31
"""A window that no text fills."""

MAX_STARTS = 2048
"""Most starts whose intermediate tensors are in memory at once."""

KEPT_STARTS = 512
"""Most starts of a batch whose intermediate tensors are kept for the backward pass; those of more are computed again."""


def unroll(
    fuse: Callable[[Tensor], Tensor],
    layers: Sequence[DraftLayer],
    norm: Callable[[Tensor], Tensor],
    features: Tensor,
    batch: DraftBatch,
    alignment: Alignment,
    embedding: Tensor,
    recycles_normed: bool,
) -> list[Tensor]:
    """Return the states [S, H] that the head reads for each start, one tensor for each draft position.

    fuse: maps rows of features [N, F], the target's hidden states, to the first hidden state [R, H]. Every position is
    fed the true token (teacher forcing) and, after the first, the last layer's own output of the position before: with
    recycles_normed after the final norm, otherwise before it. Layers but the last compute draft position 0 for all
    context rows, whose keys and values the next layer needs.
    """
    first, last, rows = layers[0].self_attn, layers[-1], alignment.context_rows
    dtype, window = first.o_proj.weight.dtype, first.sizes.sliding_window or WHOLE_TEXT

    def embed(rows: Tensor) -> Tensor:
        return embedding.detach()[batch.token_ids[rows]].to(dtype)

    def read_context(layer: DraftLayer, states: Tensor) -> tuple[Tensor, ...]:
        """Return the hidden states that `draft` starts with, and keys and values of all context rows."""
        hidden, positions = fuse(states) if layer is layers[0] else states, batch.positions[rows]
        x, _ = layer.attention_input(embed(rows + 1), hidden, positions)
        starts = hidden[alignment.starts_in_context] if layer is last else hidden
        return starts, *layer.self_attn.keys_and_values(x, positions)

    def draft(
        layer: DraftLayer, position: int, of: Alignment, context: tuple[Tensor, Tensor], starts: slice, hidden: Tensor,
        *own: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        positions = batch.positions[of.start_rows[starts]] + position
        x, residual = layer.attention_input(embed(of.input_rows(position)[starts]), hidden, positions)
        # At draft position 0 a start's own key is the last one it sees of the context.
        own = own + layer.self_attn.keys_and_values(x, positions) if position else ()
        none = context[0].new_empty(len(x), 0, *context[0].shape[1:])
        keys, values = (torch.cat([none, *(t[:, None] for t in own[i::2][-window:])], 1) for i in (0, 1))
        queries = layer.self_attn.queries(x, positions)[:, None]
        seen = first_seen(batch, rows, of.start_rows[starts], window - position - 1)
        attended = attend(queries, context, (keys, values), of, starts, seen)
        hidden = layer.finish(attended[:, 0], residual, x)
        normed = norm(hidden) if layer is last else hidden
        return normed if recycles_normed else hidden, normed, *own[-2:]

    hidden, contexts = features[rows].to(dtype), list[tuple[Tensor, Tensor]]()
    for layer in layers:
        hidden, keys, values = run(len(rows) <= 4 * KEPT_STARTS, read_context, layer, hidden)
        contexts.append((keys, values))
        if layer is not last:
            hidden, _ = in_chunks(draft, hidden, [], layer, 0, alignment.of_context(batch), contexts[-1])
    outputs, own = list[Tensor](), [list[Tensor]() for _ in layers]
    for position in range(len(alignment.supervised)):
        for layer, context, kept in list(zip(layers, contexts, own, strict=True))[0 if position else -1 :]:
            hidden, normed, *own_here = in_chunks(draft, hidden, kept, layer, position, alignment, context)
            kept += own_here
        outputs.append(normed)
    return outputs


def first_seen(batch: DraftBatch, rows: Tensor, starts: Tensor, reach: int) -> Tensor:
    """Return the place among the context rows of the first one [S] that is at most `reach` positions before each start."""
    order = batch.document_ids * 2 * WHOLE_TEXT + batch.positions  # rises from row to row
    return torch.searchsorted(order[rows], order[starts] - reach)


def in_chunks(draft: Callable[..., Any], hidden: Tensor, own: Sequence[Tensor], *args: Any) -> Iterator[Tensor]:
    """Call draft(*args, starts, hidden, *own) for one slice of starts after the other; hidden is [S, H]. Join what it returns."""
    # Without any start, one empty chunk keeps the shapes.
    chunks = [slice(at, at + MAX_STARTS) for at in range(0, max(len(hidden), 1), MAX_STARTS)]
    keeps = len(hidden) <= KEPT_STARTS
    parts = [run(keeps, draft, *args, starts, hidden[starts], *(t[starts] for t in own)) for starts in chunks]
    return (torch.cat(tensors) for tensors in zip(*parts, strict=True))
