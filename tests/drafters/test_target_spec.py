"""What a drafter must know of its target, from any age of config.json."""

import json

import pytest
from transformers import AutoConfig

from drafters.base import Experts, TargetSpec
from drafters.target import EPS

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


def test_target_spec_from_a_model_folder(tmp_path):
    spec = spec_of(tmp_path, rope_theta=5e5)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert spec.head_dim == 4
    assert spec.eos_token_ids == (2, 7)
    assert spec.num_layers == 8


LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "partial_rotary_factor": 0.25, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_scaling": {"type": "linear", "factor": 2.0}}, LINEAR),
        ({"rope_parameters": LINEAR}, LINEAR),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": LINEAR}}, LINEAR),
        ({"rope_parameters": YARN}, YARN | {"original_max_position_embeddings": 512}),
        ({"rope_parameters": YARN, "original_max_position_embeddings": 64},
         YARN | {"original_max_position_embeddings": 64}),
        ({"rope_theta": 5e5, "partial_rotary_factor": 1.0}, {"rope_type": "default", "rope_theta": 5e5}),
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"model_type": "smollm3"}, {"rope_type": "default", "rope_theta": 2e6}),
        ({"model_type": "unheard_of"}, {"rope_type": "default", "rope_theta": 1e4}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_rotated_and_how_is_what_transformers_reads(tmp_path, fields, rope):
    assert spec_of(tmp_path, **fields).rope_parameters == rope
    if fields.get("model_type") != "unheard_of" and "full_attention" not in fields.get("rope_parameters", ()):
        config = AutoConfig.from_pretrained(tmp_path)
        config.standardize_rope_params()  # as whoever computes frequencies does
        theirs = config.rope_parameters
        assert {name: theirs[name] for name in rope} == rope


@pytest.mark.parametrize("name", EPS)
def test_the_eps_of_norms_by_any_name_and_the_text_model_of_a_wrapper(tmp_path, name):
    text = {key: value for key, value in HF_CONFIG.items() if key != "rms_norm_eps"} | {name: 1e-3}
    wrapper = {"model_type": "wrapper", "text_config": text, "vision_config": {"hidden_size": 9}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    spec = TargetSpec.from_pretrained(tmp_path)
    assert (spec.rms_norm_eps, spec.hidden_size, spec.model_type) == (1e-3, 16, "llama")


@pytest.mark.parametrize("field", ["vocab_size", "num_attention_heads", "rms_norm_eps"])
def test_a_target_without_a_needed_field_is_refused(tmp_path, field):
    config = {key: value for key, value in HF_CONFIG.items() if key != field}
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
