"""EAGLE-3 checkpoint folders: what engines find in them, and what only they can have wrong."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from drafters.aux_layers import check_aux_layers
from drafters.build import build_drafter, load_drafter, shape_problems
from drafters.config import Eagle3Config
from drafters.eagle3.model import Eagle3Drafter
from tests.drafters.conftest import EAGLE3, TARGET, assert_same_state, edit_config, make_drafter


@pytest.fixture
def drafter(target_weights):
    drafter = make_drafter().float()
    drafter.choose_vocabulary(torch.arange(TARGET.vocab_size), target_weights)
    return drafter


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save(tmp_path / "drafter", torch.float32)
    return tmp_path / "drafter"


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors")


def test_files_are_what_engines_read(folder):
    tensors = load_file(folder / "model.safetensors")
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    layer += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    names = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} | {f"layers.0.{n}.weight" for n in layer}
    names |= {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(tensors) == names
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)

    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "llama" and config.architectures == ["LlamaForCausalLMEagle3"]
    assert config.target_hidden_size == TARGET.hidden_size
    assert config.rope_parameters == TARGET.rope_parameters
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_older_names_and_an_embedding_are_read(drafter, folder):
    def older(tensors):
        renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        return renamed | {"embed_tokens.weight": torch.zeros(TARGET.vocab_size, TARGET.hidden_size)}

    edit_tensors(folder, older)
    assert_same_state(load_drafter(folder, TARGET), drafter)


def test_a_drafter_that_reads_layers_the_target_has_not_is_refused(folder):
    with pytest.raises(ValueError, match=re.escape("aux layers [2, 4, 5] are not ascending ids between 1 and 4")):
        load_drafter(folder, dataclasses.replace(TARGET, num_layers=5))


def test_a_checkpoint_of_another_target_is_refused(folder):
    edit_config(folder, target_hidden_size=32)
    with pytest.raises(ValueError, match="another target: its hidden_size is 32, this one's is 16"):
        load_drafter(folder, TARGET)


ALL = {"norm_output": True, "norm_before_fc": True, "attention_bias": True, "num_layers": 2, "aux_layers": (1, 2, 4, 5)}


def test_every_fact_of_a_checkpoint_is_read_and_written_back(tmp_path):
    drafter = make_drafter(**ALL, norm_before_residual=True, sliding_window=9).float()
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    sizes = dataclasses.replace(drafter.shape.sizes, rope_parameters=rope | {"truncate": False})
    drafter.shape = dataclasses.replace(drafter.shape, sizes=sizes)
    drafter.save(tmp_path, torch.float32)
    edit_tensors(tmp_path, lambda tensors: tensors | {"layers.1.hidden_norm.weight": torch.ones(16)})  # vLLM has it
    loaded = load_drafter(tmp_path, TARGET, config=EAGLE3.configured(num_layers=2, aux_layers=(1, 2, 4, 5)))
    assert loaded.shape == drafter.shape
    assert_same_state(loaded, drafter)
    edit_config(tmp_path, norm_before_fc=False, eagle_config={"norm_before_fc": True})
    assert load_drafter(tmp_path, TARGET).shape == drafter.shape


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
AUX = "eagle_aux_hidden_state_layer_ids"
YARN = {"type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32.0}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"rope_theta": None}, {"aux_layers": (2, 4, 5), "rope_theta": 1e4}),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_theta": 1e6, "rope_type": "default"}),
        ({"rope_theta": None, "eagle_config": {AUX: [1, 3, 5]}}, {"aux_layers": (2, 4, 6)}),
        ({"eagle_config": {AUX: [1, 3, 5], "use_aux_hidden_state": True}}, {"aux_layers": (2, 4, 6)}),
        ({"eagle_config": {AUX: [1, 3, 5]}, AUX: [1, 3, 5]}, {"aux_layers": (1, 3, 5)}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_type": "llama3", "rope_theta": 5e5}),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 128}}, {"rope_type": "yarn", "mscale": 0.7}),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, {"rope_type": "default"}),
        ({"norm_output": True, "fc_norm": True}, {"norm_output": True, "fc_norm": True}),
        ({"model_type": "phi3", "rope_theta": 250000.0}, {"rope_theta": 250000.0}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64}, {"rope_type": "default"}),
        ({"attention_bias": True, "draft_vocab_size": 20, "target_hidden_size": 16}, {"attention_bias": True}),
    ],
    ids=str,
)
def test_configurations_like_those_that_are_public_are_read(tmp_path, fields, wanted):
    sizes = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 40, "hidden_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1, "max_position_embeddings": 512, "rope_theta": 1e4, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "use_cache": True, "draft_vocab_size": 20,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes | fields))
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    shape, _ = Eagle3Drafter.read(tmp_path, TARGET, 3)
    assert Eagle3Drafter(shape).to_config(shape)[AUX] == list(shape.aux_layers)
    facts = vars(shape) | vars(shape.sizes) | shape.sizes.rope_parameters
    assert {name: facts[name] for name in wanted} == wanted


def test_a_new_drafter_rotates_as_its_target_unless_that_follows_the_length():
    def rope_of(**rope):
        return Eagle3Drafter.shape_of(
            EAGLE3.config, dataclasses.replace(TARGET, rope_parameters=rope)
        ).sizes.rope_parameters

    linear = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0, "partial_rotary_factor": 0.5}
    assert rope_of(**linear) == linear
    assert rope_of(rope_type="dynamic", rope_theta=5e5, factor=2.0) == {"rope_type": "default", "rope_theta": 5e5}


def test_depth_is_the_checkpoints_own_unless_it_says_none(folder):
    assert Eagle3Drafter.read(folder, TARGET, 5)[0].trained_depth == 3
    edit_config(folder, speculators_config=None)
    config = Eagle3Config(type="eagle3", draft_vocab_size=20, trained_depth=5)
    assert load_drafter(folder, TARGET, config=config).shape.trained_depth == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, '"layers.1.input_layernorm.weight"'),
        ({"norm_before_fc": True}, '"input_norm.weight"'),
        ({"attention_bias": True}, '"layers.0.self_attn.k_proj.bias"'),
        ({"model_type": "mistral"}, "model_type mistral is not supported"),
        ({"num_attention_heads": 3}, "transformers takes no hidden_size 16 that 3 heads do not divide"),
        ({"hidden_act": "gelu"}, "variant with hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "variant with mlp_bias = True"),
        ({"qkv_bias": True}, "variant with qkv_bias = True"),
        ({"logit_scale": 0.5}, "variant with logit_scale = 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "variant with quantization_config = {'quant_method'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "variant with use_aux_hidden_state = False"),
        ({"eagle_config": {"norm_before_fc": True}}, '"input_norm.weight"'),
        (
            {"sliding_window": 8, "use_sliding_window": None},
            'no sliding_window = 8 without layer_types; add "layer_types": ["sliding_attention"]',
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types ['full_attention', 'sliding_"),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
        ({"speculators_config": None}, "how many draft positions"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, "[2, 2, 5] are not ascending ids"),
        ({"draft_vocab_size": 19}, "size mismatch for lm_head.weight"),
        ({"max_position_embeddings": None}, "has no max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "cannot be computed: "),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "cannot be computed: "),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' follows the length"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_drafter(folder, TARGET)


def test_the_window_is_the_one_that_vllm_serves_it_with(folder):
    """Its own, by layer_types as vLLM reads them, and otherwise that of the KV cache, which is the target's."""

    def window(target_window, **changes):
        edit_config(folder, **changes)
        return load_drafter(
            folder, dataclasses.replace(TARGET, sliding_window=target_window)
        ).shape.sizes.sliding_window

    assert (window(None), window(7)) == (None, 7)
    assert window(None, sliding_window=9, use_sliding_window=False) is None
    assert window(7, layer_types=["full_attention"]) == 7
    assert (window(None, layer_types=["sliding_attention"]), window(7)) == (9, 9)
    drafter = load_drafter(folder, TARGET)
    drafter.save(folder, torch.float32)
    assert load_drafter(folder, TARGET).shape == drafter.shape


@pytest.mark.parametrize("edit", [lambda d2t: d2t + 1, lambda d2t: d2t.flip(0)], ids=["shifted", "reversed"])
def test_maps_that_contradict_each_other_are_refused(folder, edit):
    edit_tensors(folder, lambda tensors: tensors | {"d2t": edit(tensors["d2t"])})
    with pytest.raises(ValueError, match="d2t and t2d"):
        load_drafter(folder, TARGET)


def test_default_aux_layers():
    def default(num_layers):
        return check_aux_layers(None, dataclasses.replace(TARGET, num_layers=num_layers), "drafter.model.aux_layers")

    assert default(30) == (2, 15, 27)
    assert default(8) == (2, 4, 5)
    for num_layers in (1, 4, 5, 6):
        with pytest.raises(ValueError, match=r"drafter\.model\.aux_layers.*set such ids"):
            default(num_layers)


def test_the_draft_vocabulary_is_as_large_as_a_small_targets_and_as_the_checkpoints(folder):
    config = Eagle3Config(type="eagle3")
    assert Eagle3Drafter.shape_of(config, TARGET).draft_vocab_size == TARGET.vocab_size
    assert Eagle3Drafter.shape_of(config, dataclasses.replace(TARGET, vocab_size=32000)).draft_vocab_size == 8192
    known = load_drafter(folder, TARGET, config=config).shape.draft_vocab_size
    assert known < TARGET.vocab_size and known == load_drafter(folder, TARGET).shape.draft_vocab_size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": 41}, "drafter.model.draft_vocab_size: 41 is above the target's vocabulary of 40"),
        (
            {"aux_layers": (2, 4, 8)},
            "drafter.model.aux_layers: aux layers [2, 4, 8] are not ascending ids between 1 and 7",
        ),
        (
            {"aux_layers": (0, 2, 5)},
            "drafter.model.aux_layers: aux layers [0, 2, 5] are not ascending ids between 1 and 7",
        ),
        ({"aux_layers": (4, 2, 5)}, "drafter.model.aux_layers: aux layers [4, 2, 5] are not ascending ids"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(fields, message):
    config = Eagle3Config(**({"type": "eagle3", "draft_vocab_size": 20} | fields))
    with pytest.raises(ValueError, match=re.escape(message)):
        build_drafter(config, TARGET, seed=0)
    (problem,) = shape_problems(config, TARGET)
    assert message in problem
