"""The unroll against decoding with a KV cache, one token at a time, as an engine serves the drafter."""

import dataclasses

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drafters.alignment import align
from drafters.base import DraftBatch
from drafters.eagle3 import unroll as unroll_module
from drafters.eagle3.model import Eagle3Drafter
from drafters.eagle3.unroll import unroll
from tests.drafters.conftest import TARGET, make_batch, make_drafter

HEADS, KV_HEADS, SIZE = TARGET.num_attention_heads, TARGET.num_key_value_heads, TARGET.head_dim


class CachedDecoder:
    """One row through the layer at a time; the cache is a list of (key, value), each [kv heads, D]."""

    def __init__(self, drafter: Eagle3Drafter):
        self.weights = drafter.state_dict()
        self.norm_before_residual = drafter.shape.norm_before_residual

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean() + TARGET.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"] @ x

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        frequencies = TARGET.rope_theta ** -(torch.arange(0, SIZE, 2).float() / SIZE)
        angles = torch.cat([position * frequencies] * 2)
        return apply_rotary_pos_emb(x[None], x[None], angles.cos()[None], angles.sin()[None])[0][0]

    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        layers = aux_hidden.chunk(3)
        if "fc_norm.0.weight" in self.weights:
            layers = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(layers)]
        return self.linear(torch.cat(list(layers)), "fc")

    def step(self, embedding, hidden, position: int, cache: list) -> torch.Tensor:
        """Append this row to the cache and return the layer's output [H] before the final norm."""
        normed = self.norm(hidden, "layers.0.hidden_norm")
        x = torch.cat([self.norm(embedding, "layers.0.input_layernorm"), normed])
        residual = normed if self.norm_before_residual else hidden
        q, k, v = (self.linear(x, f"layers.0.self_attn.{n}_proj").view(-1, SIZE) for n in "qkv")
        cache.append((self.rotate(k, position), v))
        q = self.rotate(q, position)
        attended = []
        for head in range(HEADS):
            keys, values = (torch.stack(t)[:, head * KV_HEADS // HEADS] for t in zip(*cache, strict=True))
            attended.append((keys @ q[head] / SIZE**0.5).softmax(0) @ values)
        hidden = residual + self.linear(torch.cat(attended), "layers.0.self_attn.o_proj")
        x = self.norm(hidden, "layers.0.post_attention_layernorm")
        gate, up = (self.linear(x, f"layers.0.mlp.{n}_proj") for n in ("gate", "up"))
        return hidden + self.linear(silu(gate) * up, "layers.0.mlp.down_proj")


def decode(drafter: Eagle3Drafter, batch: DraftBatch, embedding: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
    """(draft position, start row) -> normed state, drafting from every row of every document with the true tokens."""
    decoder = CachedDecoder(drafter)
    states = {}
    for document in batch.document_ids.unique():
        rows = (batch.document_ids == document).nonzero().flatten().tolist()
        prefix: list = []
        for index, row in enumerate(rows[:-1]):
            if not batch.feature_mask[row]:
                continue
            hidden = decoder.fuse(batch.aux_hidden[row])
            cache = prefix.copy()
            for position in range(drafter.trained_depth):
                if index + 1 + position >= len(rows):
                    break
                token = batch.token_ids[rows[index + 1 + position]]
                hidden = decoder.step(embedding[token], hidden, int(batch.positions[row]) + position, cache)
                states[position, row] = decoder.norm(hidden, "norm")
            prefix = cache[: len(prefix) + 1]
    return states


def unrolled(drafter, batch, embedding):
    alignment = align(batch, drafter.trained_depth)
    return alignment, unroll(drafter.fuse, drafter.layers[0], drafter.norm, batch, alignment, embedding)


DOCUMENTS = {
    "one": [(3, 8, 0)],
    "two packed": [(3, 8, 0), (2, 6, 0)],
    "cached prompts": [(9, 7, 6), (4, 5, 0), (5, 6, 8)],
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("variant", [{"fc_norm": False}, {"fc_norm": True}, {"norm_before_residual": True}], ids=str)
def test_unroll_equals_decoding_with_a_kv_cache(documents, variant, target_weights):
    batch = make_batch(*documents)
    drafter = make_drafter(trained_depth=4, **variant)
    alignment, outputs = unrolled(drafter, batch, target_weights.embedding)
    expected = decode(drafter, batch, target_weights.embedding)
    compared = 0
    for position, output in enumerate(outputs):
        for start, row in enumerate(alignment.start_rows.tolist()):
            if alignment.supervised[position, start]:
                torch.testing.assert_close(output[start], expected[position, row], rtol=1e-6, atol=1e-6)
                compared += 1
    assert compared == int(alignment.supervised.sum()) > 20


@pytest.mark.parametrize(
    "bounds", [{"MAX_SCORES": 300}, {"MAX_STARTS": 7}, {"MAX_SCORES": 300, "MAX_STARTS": 7}], ids=str
)
def test_chunks_change_nothing(bounds, target_weights, monkeypatch):
    batch, drafter = make_batch((5, 30, 0), (3, 8, 2)), make_drafter()
    parameters = list(drafter.layers.parameters())

    def outputs_and_gradients():
        outputs = unrolled(drafter, batch, target_weights.embedding)[1]
        return outputs, torch.autograd.grad(sum(output.square().sum() for output in outputs), parameters)

    whole = outputs_and_gradients()
    for name, value in bounds.items():
        monkeypatch.setattr(unroll_module, name, value)
    torch.testing.assert_close(outputs_and_gradients(), whole)


def test_gradients_equal_finite_differences(target_weights):
    batch, drafter = make_batch((2, 4, 0)), make_drafter()

    def total() -> torch.Tensor:
        return sum(output.square().sum() for output in unrolled(drafter, batch, target_weights.embedding)[1])

    generator = torch.Generator().manual_seed(0)
    parameters = [parameter for name, parameter in drafter.named_parameters() if name != "lm_head.weight"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(total(), parameters), strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            before = parameter.clone()
            parameter.copy_(before + 1e-6 * direction)
            above = total()
            parameter.copy_(before - 1e-6 * direction)
            below = total()
            parameter.copy_(before)
        torch.testing.assert_close((above - below) / 2e-6, (gradient * direction).sum(), rtol=1e-5, atol=1e-6)


def test_a_hole_in_one_rollout_changes_nothing_in_another(target_weights):
    drafter = make_drafter()
    whole = make_batch((6, 8, 0), (4, 9, 0))
    holed = dataclasses.replace(whole, feature_mask=whole.feature_mask.clone(), aux_hidden=whole.aux_hidden.clone())
    holed.feature_mask[:4] = False
    holed.aux_hidden[:4] = torch.nan
    results = []
    for batch in (whole, holed):
        alignment, outputs = unrolled(drafter, batch, target_weights.embedding)
        second = batch.document_ids[alignment.start_rows] == 1
        results.append([output[second] for output in outputs])
        assert all(output.isfinite().all() for output in outputs)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_no_start_is_an_empty_result(target_weights):
    _, outputs = unrolled(make_drafter(), make_batch((4, 0, 0)), target_weights.embedding)
    assert [output.shape for output in outputs] == [(0, TARGET.hidden_size)] * 3
