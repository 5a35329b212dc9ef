"""What a drafter must know of its target, from any age of config.json."""

import json

import pytest

from drafters.base import Experts, TargetSpec

HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": [2, 7],
}


def spec_of(folder, **changes) -> TargetSpec:
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | changes))
    return TargetSpec.from_pretrained(folder)


@pytest.mark.parametrize("rope", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_target_spec_from_a_model_folder(tmp_path, rope):
    spec = spec_of(tmp_path, **rope)
    assert spec.rope_theta == 5e5
    assert spec.head_dim == 4
    assert spec.eos_token_ids == (2, 7)
    assert spec.num_layers == 8
    assert (spec.rope_type, spec.partial_rotary_factor) == ("default", 1.0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_what_is_rotated_and_how(tmp_path, rope):
    spec = spec_of(tmp_path, **rope)
    assert (spec.rope_theta, spec.rope_type, spec.partial_rotary_factor) == (5e5, "linear", 0.25)


@pytest.mark.parametrize("field", ["vocab_size", "num_attention_heads", "rope_theta"])
def test_a_target_without_a_needed_field_is_refused(tmp_path, field):
    config = {key: value for key, value in (HF_CONFIG | {"rope_theta": 1e4}).items() if key != field}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"has no {field}"):
        TargetSpec.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("experts", "is_sparse"),
    [
        ({}, False),
        ({"num_experts": 0}, False),
        ({"num_experts": 4, "mlp_only_layers": [], "moe_intermediate_size": 8}, True),
        ({"num_experts": 4, "mlp_only_layers": [0]}, False),
        ({"num_experts": 4, "decoder_sparse_step": 2}, False),
    ],
)
def test_is_the_mlp_a_mixture_of_experts(tmp_path, experts, is_sparse):
    sizes = {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "norm_topk_prob": False}
    found = spec_of(tmp_path, rope_theta=1e4, **sizes, **experts).experts
    assert found == (Experts(number=4, per_token=2, size=8, shared_size=16, normed=False) if is_sparse else None)
