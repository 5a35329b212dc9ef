"""Drafters as an engine runs them: one token at a time, with a KV cache. Shares no code with what it checks."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from drafters.alignment import DraftBatch, align
from drafters.base import Drafter, TargetWeights
from tests.drafters.conftest import TARGET

HEADS, KV_HEADS = TARGET.num_attention_heads, TARGET.num_key_value_heads

# (prompt length, response length, rows without features at the beginning) of each rollout
DOCUMENTS = {
    "one": [(3, 8, 0)],
    "two packed": [(3, 8, 0), (2, 6, 0)],
    "cached prompts": [(9, 7, 6), (4, 5, 0), (5, 6, 8)],
}


class CachedDecoder(ABC):
    """One row through a drafter at a time; the cache is a list of (key, value), each [kv heads, D]."""

    head_dim: int
    rotary_dim: int
    window = 0  # newest rows that attention sees; 0: all

    def __init__(self, drafter: Drafter) -> None:
        self.weights = drafter.state_dict()

    @abstractmethod
    def first(self, batch: DraftBatch, row: int) -> Tensor:
        """Hidden state [H] that draft position 0 is given."""

    @abstractmethod
    def step(self, embedding: Tensor, hidden: Tensor, position: int, cache: list) -> tuple[Tensor, Tensor]:
        """Append this row to the cache; the state [H] given to the next position, and the one the head reads."""

    def gain(self, name: str) -> Tensor:
        """What the norm of this name multiplies with."""
        return self.weights[f"{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + TARGET.rms_norm_eps).sqrt() * self.gain(name)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        frequencies = TARGET.rope_parameters["rope_theta"] ** -(
            torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim
        )
        angles = torch.cat([position * frequencies] * 2)
        return apply_rotary_pos_emb(x[None], x[None], angles.cos()[None], angles.sin()[None])[0][0]

    def attend(self, q: Tensor, cache: list) -> Tensor:
        """[heads * D] from the queries [heads, D] of the newest row."""
        attended = []
        for head in range(HEADS):
            keys, values = (
                torch.stack(t)[:, head * KV_HEADS // HEADS] for t in zip(*cache[-self.window :], strict=True)
            )
            attended.append((keys @ q[head] / self.head_dim**0.5).softmax(0) @ values)
        return torch.cat(attended)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self.linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.linear(silu(gate) * up, f"{name}.down_proj")


def decode(decoder: CachedDecoder, batch: DraftBatch, embedding: Tensor, depth: int) -> dict[tuple[int, int], Tensor]:
    """(draft position, start row) -> what the head reads, drafting from every row of every rollout's true tokens."""
    states = {}
    for document in batch.document_ids.unique():
        rows = (batch.document_ids == document).nonzero().flatten().tolist()
        prefix: list = []
        for index, row in enumerate(rows[:-1]):
            if not batch.feature_mask[row]:
                continue
            hidden = decoder.first(batch, row)
            cache = prefix.copy()
            for position in range(depth):
                if index + 1 + position >= len(rows):
                    break
                token = batch.token_ids[rows[index + 1 + position]]
                at = int(batch.positions[row]) + position
                hidden, states[position, row] = decoder.step(embedding[token], hidden, at, cache)
            prefix = cache[: len(prefix) + 1]
    return states


def assert_unroll_equals(decoder: CachedDecoder, drafter: Drafter, batch: DraftBatch, target: TargetWeights) -> None:
    """At every supervised draft position of every start."""
    decoder.window = drafter.shape.sizes.sliding_window or 0
    alignment = align(batch, drafter.shape.trained_depth)
    outputs = drafter.drafts(batch, alignment, target)[0]
    expected = decode(decoder, batch, target.embedding, drafter.shape.trained_depth)
    compared = 0
    for position, output in enumerate(outputs):
        for start, row in enumerate(alignment.start_rows.tolist()):
            if alignment.supervised[position, start]:
                torch.testing.assert_close(output[start], expected[position, row], rtol=1e-6, atol=1e-6)
                compared += 1
    assert compared == int(alignment.supervised.sum()) > 20
