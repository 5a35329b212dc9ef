"""Checkpoint folders: what goes out comes back, and what is broken or foreign is refused."""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from drafters.base import TargetSpec
from drafters.build import build_drafter, default_aux_layers, load_drafter
from drafters.config import Eagle3Config
from tests.drafters.conftest import TARGET, make_drafter


@pytest.fixture
def drafter(target_weights):
    drafter = make_drafter().float()
    drafter.choose_vocabulary(torch.arange(TARGET.vocab_size), target_weights)
    return drafter


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save(tmp_path / "drafter", torch.float32)
    return tmp_path / "drafter"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft_vocab_size", [20, TARGET.vocab_size])
def test_roundtrip(dtype, draft_vocab_size, tmp_path):
    drafter = make_drafter(draft_vocab_size=draft_vocab_size, norm_before_residual=True, trained_depth=5).float()
    drafter.save(tmp_path, dtype)
    loaded = load_drafter(tmp_path, TARGET)
    assert loaded.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        expected = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
        torch.testing.assert_close(loaded.state_dict()[name], expected, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_loading_into_a_drafter(drafter, folder):
    other = build_drafter(Eagle3Config(type="eagle3", draft_vocab_size=20, aux_layers=(2, 4, 5)), TARGET, seed=9)
    parameter = other.fc.weight
    other.load(folder)
    assert other.fc.weight is parameter  # an optimizer keeps holding it
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


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
    assert config.rope_parameters["rope_theta"] == TARGET.rope_theta
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_older_names_and_an_embedding_are_read(drafter, folder):
    def older(tensors):
        renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        return renamed | {"embed_tokens.weight": torch.zeros(TARGET.vocab_size, TARGET.hidden_size)}

    edit_tensors(folder, older)
    loaded = load_drafter(folder, TARGET).state_dict()
    assert loaded.keys() == drafter.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "another target: its hidden size is 16, this target's is 32"),
        ({"vocab_size": 41}, "another target: its vocabulary is 40, this target's is 41"),
        ({"num_layers": 5}, "aux layers [2, 4, 5] are not all between 1 and 4"),
    ],
)
def test_a_drafter_for_another_target_is_refused(folder, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_drafter(folder, dataclasses.replace(TARGET, **change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "holds LlamaForCausalLM, not a drafter"),
        ({"norm_output": True}, "variant with norm_output"),
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
        ({"speculators_config": None}, "how many draft positions"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, "ascending and different"),
        ({"draft_vocab_size": 19}, "lm_head.weight is [20, 16], expected [19, 16]"),
        ({"max_position_embeddings": None}, "has no max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope_type 'linear'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_drafter(folder, TARGET)


def test_a_drafter_keeps_its_own_position_limit_and_is_refused_where_it_is_too_short(folder, tmp_path):
    edit_config(folder, max_position_embeddings=128)
    drafter = load_drafter(folder, TARGET, num_positions=128)
    assert drafter.max_positions == 128 < TARGET.max_position_embeddings
    drafter.save(tmp_path / "again", torch.float32)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["max_position_embeddings"] == 128
    with pytest.raises(ValueError, match=r"has 128 positions .* but 129 are needed"):
        load_drafter(folder, TARGET, num_positions=129)


class Killed(BaseException):
    """What a process that is killed raises nowhere: no handler of ours may mend the folder."""


@pytest.mark.parametrize("in_use", [False, True], ids=["new folder", "folder in use"])
def test_a_kill_at_any_moment_leaves_a_whole_drafter_or_none(drafter, tmp_path, monkeypatch, in_use):
    folder, moments = tmp_path / "v1", 0
    newer = make_drafter(seed=7).float()
    monkeypatch.setattr("drafters.base.shutil.rmtree", lambda *_, **__: None)  # a dead process tidies nothing up
    for moment in range(20):
        for path in (folder, tmp_path / ".v1.partial"):
            for file in path.glob("*"):
                file.unlink()
            if path.exists():
                path.rmdir()
        if in_use:
            drafter.save(folder, torch.float32)
        if not kill_while_saving(newer, folder, moment, monkeypatch):
            break
        moments += 1
        try:
            found = load_drafter(folder, TARGET)
        except ValueError as error:
            assert "config.json does not exist" in str(error)
        else:
            assert any(torch.equal(found.fc.weight, whole.fc.weight) for whole in (drafter, newer))
    assert moments >= 6
    assert torch.equal(load_drafter(folder, TARGET).fc.weight, newer.fc.weight)


def kill_while_saving(drafter, folder, moment, monkeypatch):
    """Save, and die before the moment-th call that touches the disk; False when there are fewer."""
    calls = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("drafters.base.save_file", "drafters.base.os.replace", "drafters.base.os.fsync"):
            module, _, attribute = name.rpartition(".")
            patch.setattr(
                name, dying(getattr(importlib.import_module("os" if module.endswith("os") else module), attribute))
            )
        patch.setattr("drafters.base.Path.unlink", dying(Path.unlink))
        try:
            drafter.save(folder, torch.float32)
        except Killed:
            return True
    return False


def test_a_full_disk_leaves_the_drafter_that_was_there(drafter, folder, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("drafters.base.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        make_drafter(seed=7).save(folder, torch.float32)
    assert torch.equal(load_drafter(folder, TARGET).fc.weight, drafter.fc.weight)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("fc.weight"), "missing fc.weight"),
        (without("d2t"), "missing d2t"),
        (lambda tensors: tensors | {"fc.bias": torch.zeros(16)}, "unexpected fc.bias"),
        (lambda tensors: tensors | {"norm.weight": torch.zeros(17)}, "norm.weight is [17], expected [16]"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"] + 1}, "d2t and t2d"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"].flip(0)}, "d2t and t2d"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(drafter, folder, edit, message):
    edit_tensors(folder, edit)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for load in (lambda: load_drafter(folder, TARGET), lambda: drafter.load(folder)):
        with pytest.raises(ValueError, match=re.escape(message)):
            load()
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("size", [0, 4, 200, -8])
def test_a_truncated_file_is_refused(folder, size):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load_drafter(folder, TARGET)


def test_missing_and_broken_files_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=re.escape("nowhere/config.json does not exist")):
        load_drafter(tmp_path / "nowhere", TARGET)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=re.escape("model.safetensors does not exist")):
        load_drafter(folder, TARGET)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="is not JSON"):
        load_drafter(folder, TARGET)


def test_default_aux_layers():
    assert default_aux_layers(dataclasses.replace(TARGET, num_layers=30)) == (2, 15, 27)
    assert default_aux_layers(TARGET) == (2, 4, 5)
    for num_layers in (1, 4, 5, 6):
        with pytest.raises(ValueError, match=r"drafter\.model\.aux_layers"):
            default_aux_layers(dataclasses.replace(TARGET, num_layers=num_layers))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": 41}, "drafter.model.draft_vocab_size 41 is above the target's vocabulary of 40"),
        ({"aux_layers": (2, 4, 8)}, "drafter.model.aux_layers: aux layers [2, 4, 8] are not all between 1 and 7"),
        ({"aux_layers": (4, 2, 5)}, "must be ascending"),
        ({"aux_layers": (0, 2, 5)}, "not all between 1 and 7"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(fields, message):
    config = Eagle3Config(**({"type": "eagle3", "draft_vocab_size": 20} | fields))
    with pytest.raises(ValueError, match=re.escape(message)):
        build_drafter(config, TARGET, seed=0)


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


@pytest.mark.parametrize("rope", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_target_spec_from_a_model_folder(tmp_path, rope):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | rope))
    spec = TargetSpec.from_pretrained(tmp_path)
    assert spec.rope_theta == 5e5
    assert spec.head_dim == 4
    assert spec.eos_token_ids == (2, 7)
    assert spec.num_layers == 8


@pytest.mark.parametrize("field", ["vocab_size", "num_attention_heads", "rope_theta"])
def test_a_target_without_a_needed_field_is_refused(tmp_path, field):
    config = {key: value for key, value in (HF_CONFIG | {"rope_theta": 1e4}).items() if key != field}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"has no {field}"):
        TargetSpec.from_pretrained(tmp_path)
