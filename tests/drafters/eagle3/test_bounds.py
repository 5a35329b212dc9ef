"""Bounds on activations: never exceeded by a forward pass, and broken by weights that overflow in one."""

import pytest
import torch

from drafters.eagle3.bounds import LARGEST, _bounds, overflowing
from tests.drafters.conftest import make_drafter


def bounds_of(drafter):
    return _bounds(drafter.shape, drafter.layers[0], drafter.state_dict())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [1.0, 1e6])
@torch.no_grad()
def test_no_input_exceeds_them(seed, scale):
    drafter = make_drafter(seed)
    layer, bounds = drafter.layers[0], bounds_of(drafter)
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return scale * torch.randn(*size, generator=generator, dtype=torch.float64)

    fused = drafter.fuse(random(64, 3 * drafter.shape.hidden_size))
    x, _ = layer.attention_input(random(64, drafter.shape.hidden_size), fused)
    keys, values = layer.self_attn.keys_and_values(x, torch.arange(64))
    queries = layer.self_attn.queries(x, torch.arange(64))
    attended = values.repeat_interleave(2, dim=1)
    output = layer.finish(attended, fused)
    found = {
        "keys": keys,
        "values": values,
        "attention scores": queries @ keys.repeat_interleave(2, dim=1).transpose(1, 2),
        "attention output": layer.self_attn.o_proj(attended.flatten(1)),
        "logits": drafter.lm_head(drafter.norm(output)),
        "squared hidden state": output.square().sum(1),
    }
    for name, tensor in found.items():
        assert 1e-6 * bounds[name] < float(tensor.abs().max()) <= bounds[name], name


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_finite_weights_that_overflow_are_found(part):
    drafter = make_drafter().float()
    assert drafter.overflowing() == []
    weight = getattr(drafter.layers[0].self_attn, part).weight
    with torch.no_grad():
        weight.fill_(3e38)
    assert weight.isfinite().all()
    assert any(problem.startswith("keys" if part == "k_proj" else "values") for problem in drafter.overflowing())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "fc_norm.1.weight", "layers.0.mlp.up_proj.weight"])
def test_what_is_no_number_is_found(name, value):
    drafter = make_drafter()
    with torch.no_grad():
        drafter.get_parameter(name).flatten()[3] = value
    assert drafter.overflowing()


@pytest.mark.parametrize("config", [{"fc_norm": False}, {"norm_before_residual": True}, {"draft_vocab_size": 40}])
def test_every_layout_has_bounds(config):
    drafter = make_drafter(**config)
    assert overflowing(drafter.shape, drafter.layers[0], drafter.state_dict()) == []
    assert ("squared hidden state" in bounds_of(drafter)) == (config != {"fc_norm": False})
    assert max(bounds_of(drafter).values()) < LARGEST
