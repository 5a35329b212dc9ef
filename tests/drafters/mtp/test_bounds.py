"""Bounds on a head's activations: never exceeded by a forward pass."""

import pytest
import torch

from drafters.attention import gain
from drafters.bounds import LARGEST
from drafters.mtp.bounds import activation_bounds
from tests.drafters.conftest import MTP_KINDS, QWEN3_NEXT, kind_name


@pytest.mark.parametrize("kind", MTP_KINDS, ids=kind_name)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [1.0, 1e6])
@torch.no_grad()
def test_no_input_exceeds_them(kind, seed, scale):
    head = kind.make(seed).head
    bounds, attention = activation_bounds(head), head.attention
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(64)

    def random() -> torch.Tensor:
        return scale * torch.randn(64, kind.target.hidden_size, generator=generator, dtype=torch.float64)

    x, residual = head.attention_input(random(), random(), positions)
    keys, values = attention.keys_and_values(x, positions)
    queries = attention.queries(x, positions)
    attended = values.repeat_interleave(2, dim=1)
    output = head.finish(attended, residual, x)
    after_attention = residual + attention.output(attended, x)
    found = {
        "keys": keys,
        "values": values,
        "attention scores": queries @ keys.repeat_interleave(2, dim=1).transpose(1, 2),
        "attention output": attention.output(attended, x),
        "MLP output": output - after_attention,
        "squared hidden state": output.square().sum(1),
        "squared recycled state": head.output_norm(output).square().sum(1),
    }
    if kind is QWEN3_NEXT:
        found["router logits"] = head.layer.mlp.gate(head.layer.post_attention_layernorm(after_attention))
    assert found.keys() == bounds.keys()
    for name, tensor in found.items():
        assert 1e-6 * bounds[name] < float(tensor.abs().max()) <= bounds[name], name
    assert max(bounds.values()) < LARGEST


@pytest.mark.parametrize("kind", MTP_KINDS, ids=kind_name)
@torch.no_grad()
def test_what_is_joined_is_bounded_by_itself(kind):
    """Without a layer around it, and near the worst case: both normed vectors are a row of the joining matrix."""
    head = kind.make().head
    head.attention.o_proj.weight.zero_()
    for name, parameter in head.layer.mlp.named_parameters():
        if name.endswith("down_proj.weight"):
            parameter.zero_()
    bound = (activation_bounds(head)["squared hidden state"] / kind.target.hidden_size) ** 0.5
    gains = torch.cat([gain(norm) for norm in head.joined_norms])
    first, second = (head.joining.weight * gains).chunk(2, dim=1)
    hidden, embeddings = (first, second) if head.hidden_columns.start is None else (second, first)
    largest = head.join(embeddings, hidden, torch.arange(1, len(first) + 1)).abs().max()
    assert 0.8 * bound < largest <= bound


@pytest.mark.parametrize("kind", MTP_KINDS, ids=kind_name)
def test_biases_and_gains_count(kind):
    """Each alone can make what it is part of too large."""
    for name, parameter in kind.make().float().named_parameters():
        if name.endswith(("bias", "norm.weight")):
            drafter = kind.make().float()
            drafter.get_parameter(name).data.fill_(3e38)
            assert parameter.isfinite().all() and drafter.overflowing(), name
