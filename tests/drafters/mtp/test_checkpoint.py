"""MTP checkpoint folders: what engines find in them, and which heads are not for this target."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from drafters.build import build_drafter, load_drafter, shape_problems
from drafters.config import MtpConfig
from drafters.mtp.model import MtpDrafter
from tests.drafters.conftest import GLM, MIMO, MTP_KINDS, QWEN3_5, QWEN3_NEXT, edit_config, kind_name

LAYER = ["input_layernorm.weight", "post_attention_layernorm.weight"]
LAYER += [f"self_attn.{part}_proj.weight" for part in "qkvo"]
MLP = [f"{part}_proj.weight" for part in ("gate", "up", "down")]

MIMO_TENSORS = [f"{part}_layernorm.weight" for part in ("token", "hidden", "final")] + ["input_proj.weight"]
MIMO_TENSORS += LAYER + [f"mlp.{name}" for name in MLP] + [f"self_attn.{part}_proj.bias" for part in "qkv"]
QWEN3_NEXT_TENSORS = [f"{part}.weight" for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")]
QWEN3_NEXT_TENSORS += [f"layers.0.mlp.{gate}.weight" for gate in ("gate", "shared_expert_gate")]
QWEN3_NEXT_TENSORS += [
    f"layers.0.mlp.{e}.{name}" for e in ["shared_expert", *(f"experts.{i}" for i in range(4))] for name in MLP
]
QWEN3_NEXT_TENSORS += [f"layers.0.{name}" for name in [*LAYER, "self_attn.q_norm.weight", "self_attn.k_norm.weight"]]
QWEN3_5_TENSORS = [name for name in QWEN3_NEXT_TENSORS if "mlp" not in name] + [f"layers.0.mlp.{name}" for name in MLP]
GLM_TENSORS = [f"{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mlp.gate")] + LAYER
GLM_TENSORS += [f"self_attn.{part}_proj.bias" for part in "qkv"] + [f"self_attn.{part}_norm.weight" for part in "qk"]
GLM_TENSORS += [f"mlp.{e}.{name}" for e in ["shared_experts", *(f"experts.{i}" for i in range(4))] for name in MLP]
GLM_TENSORS += ["mlp.gate.e_score_correction_bias"]


@pytest.fixture(params=MTP_KINDS, ids=kind_name)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    kind.make().save(tmp_path, torch.float32)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "prefix", "names", "architecture", "model_type"),
    [
        (MIMO, "model.mtp_layers.0.", MIMO_TENSORS, "MiMoForCausalLM", "qwen2"),
        (QWEN3_NEXT, "mtp.", QWEN3_NEXT_TENSORS, "Qwen3NextMTP", "qwen3_next"),
        (QWEN3_5, "mtp.", QWEN3_5_TENSORS, "Qwen3_5MTP", "qwen3_5_text"),
        (GLM, "model.layers.8.", GLM_TENSORS, "Glm4MoeForCausalLM", "glm4_moe"),
    ],
    ids=["mimo", "qwen3_next", "qwen3_5", "glm4_moe"],
)
def test_files_are_what_engines_read(kind, folder, prefix, names, architecture, model_type):
    assert load_file(folder / "model.safetensors").keys() == {prefix + name for name in names}
    config = AutoConfig.from_pretrained(folder)
    assert (config.architectures, config.model_type) == ([architecture], model_type)
    counted_by = "mtp_num_hidden_layers" if kind is QWEN3_5 else "num_nextn_predict_layers"
    assert getattr(config, counted_by) == json.loads((folder / "config.json").read_text())[counted_by] == 1
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert getattr(config, name) == getattr(kind.target, name)
    assert config.num_hidden_layers == kind.target.num_layers
    assert config.rope_parameters.items() >= kind.target.rope_parameters.items()
    assert config.max_position_embeddings == kind.target.max_position_embeddings


@pytest.mark.parametrize(
    ("kind", "head_dim"), [(MIMO, 4), (QWEN3_NEXT, 8)], ids=["hidden_size / heads", "the target's own"]
)
def test_heads_are_as_wide_as_the_engine_makes_them(kind, folder, head_dim):
    tensors = load_file(folder / "model.safetensors")
    (keys,) = (tensor for name, tensor in tensors.items() if name.endswith("k_proj.weight"))
    assert len(keys) == kind.target.num_key_value_heads * head_dim
    assert json.loads((folder / "config.json").read_text())["head_dim"] == head_dim


def test_several_heads_are_refused(kind, folder):
    edit_config(folder, num_nextn_predict_layers=2, mtp_num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"has 2 MTP heads .* only a single head"):
        load_drafter(folder, kind.target)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 41},
        {"hidden_size": 32},
        {"intermediate_size": 32},
        {"num_attention_heads": 2},
        {"num_key_value_heads": 1},
        {"rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}},
        {"sliding_window": 64},
    ],
    ids=str,
)
def test_the_head_of_another_model_is_refused(kind, folder, change):
    ((name, value),) = change.items()
    mine = getattr(kind.target, name)
    message = re.escape(f"made for another target: its {name} is {mine}, this one's is {value}")
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, dataclasses.replace(kind.target, **change))
    slides = {"use_sliding_window": True, "model_type": "mistral"} if name == "sliding_window" else {}
    edit_config(folder, **change, **slides)
    message = re.escape(f"made for another target: its {name} is {value}, this one's is {mine}")
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, kind.target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "llama3"}}, "only rope_type \"default\" is trained, not 'llama3'"),
        ({"model_type": "gemma3"}, "no checkpoint format of MTP heads for a target of model_type gemma3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_targets_without_a_head_that_can_be_served_are_refused(kind, change, message):
    target = dataclasses.replace(kind.target, **change)
    (problem,) = shape_problems(kind.config, target)
    assert (
        problem.startswith("drafter.model.type: ") and message in problem and 'use type = "eagle3"' in problem.lower()
    )
    with pytest.raises(ValueError, match=re.escape(problem)):
        build_drafter(kind.config, target, seed=0)


def test_sizes_that_vllm_gives_no_head_are_refused():
    (odd,) = shape_problems(MIMO.config, dataclasses.replace(MIMO.target, hidden_size=18))
    assert "an MTP head needs a hidden size that its 4 attention heads divide, not 18" in odd
    assert shape_problems(QWEN3_NEXT.config, dataclasses.replace(QWEN3_NEXT.target, hidden_size=18)) == []
    (dense,) = shape_problems(QWEN3_NEXT.config, dataclasses.replace(QWEN3_NEXT.target, experts=None))
    assert "first layer has no mixture of experts, and vLLM's head needs a" in dense


def test_a_head_of_another_format_is_refused(folder, kind):
    other = QWEN3_NEXT if kind is MIMO else MIMO
    with pytest.raises(ValueError, match=r"is an MTP head of format .* is served with one of format"):
        load_drafter(folder, other.target)


def test_a_checkpoint_is_refused_for_such_a_target(kind, folder):
    with pytest.raises(ValueError, match=r"drafter\.model\.type: "):
        load_drafter(folder, dataclasses.replace(kind.target, rope_parameters={"rope_type": "llama3"}))


def test_depth_is_the_checkpoints_own_unless_it_says_none(kind, folder):
    def depth(depth_if_unstated):
        return MtpDrafter.read(folder, kind.target, depth_if_unstated)[0].trained_depth

    assert depth(5) == depth(None) == 3
    edit_config(folder, trained_draft_positions=None)
    assert (depth(5), depth(None)) == (5, 1)
    assert load_drafter(folder, kind.target, config=MtpConfig(type="mtp", trained_depth=4)).shape.trained_depth == 4


def test_a_checkpoint_without_a_position_limit_has_the_targets(kind, folder):
    edit_config(folder, max_position_embeddings=None)
    positions = load_drafter(folder, kind.target).shape.sizes.max_position_embeddings
    assert positions == kind.target.max_position_embeddings
