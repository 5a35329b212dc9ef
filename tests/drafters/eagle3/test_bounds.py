"""Bounds on activations: never exceeded by a forward pass, and there for every layout."""

import pytest
import torch

from drafters.bounds import LARGEST
from drafters.eagle3.bounds import activation_bounds
from tests.drafters.conftest import make_drafter, unnoticed


def bounds_of(drafter):
    return activation_bounds(drafter.shape, drafter.layers[0], drafter.state_dict())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [1.0, 1e6])
@torch.no_grad()
def test_no_input_exceeds_them(seed, scale):
    drafter = make_drafter(seed)
    layer, bounds, positions = drafter.layers[0], bounds_of(drafter), torch.arange(64)
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return scale * torch.randn(*size, generator=generator, dtype=torch.float64)

    fused = drafter.fuse(random(64, 3 * drafter.shape.hidden_size))
    x, _ = layer.attention_input(random(64, drafter.shape.hidden_size), fused, positions)
    keys, values = layer.self_attn.keys_and_values(x, positions)
    queries = layer.self_attn.queries(x, positions)
    attended = values.repeat_interleave(2, dim=1)
    attention_output = layer.self_attn.o_proj(attended.flatten(1))
    output = layer.finish(attended, fused, x)
    found = {
        "keys": keys,
        "values": values,
        "attention scores": queries @ keys.repeat_interleave(2, dim=1).transpose(1, 2),
        "attention output": attention_output,
        "MLP output": output - fused - attention_output,
        "logits": drafter.lm_head(drafter.norm(output)),
        "squared hidden state": output.square().sum(1),
    }
    assert found.keys() == bounds.keys()
    for name, tensor in found.items():
        assert 1e-6 * bounds[name] < float(tensor.abs().max()) <= bounds[name], name


@pytest.mark.parametrize("config", [{"fc_norm": False}, {"norm_before_residual": True}, {"draft_vocab_size": 40}])
def test_every_layout_has_bounds(config):
    drafter = make_drafter(**config)
    assert drafter.overflowing() == []
    assert ("squared hidden state" in bounds_of(drafter)) == (config != {"fc_norm": False})
    assert max(bounds_of(drafter).values()) < LARGEST


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("config", [{"fc_norm": False}, {"norm_before_residual": True}])
def test_what_is_no_number_is_found_in_every_layout(config, value):
    assert unnoticed(make_drafter(**config), value) == []
