"""Policies with an MTP head of their own: split on load, stitched on export, and what is refused."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from cotrain.config.load import load_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import RANDOM_MODELS, native_head, resolve_model
from cotrain.models.tiny import build_random_model
from drafters.base import Experts, TargetSpec
from drafters.build import build_drafter, has_native_head, load_drafter, split, stitched
from drafters.config import Eagle3Config, MtpConfig
from pipelines.preflight import find_problems
from tests.native_models import glm4_moe_model, mimo_model, qwen3_5_model, qwen3_next_model, write_native


def qwen3_5_wrapper() -> PreTrainedModel:
    """A language model with an image encoder beside it."""
    with tempfile.TemporaryDirectory() as folder:
        build_random_model(Path(folder), RANDOM_MODELS["qwen3_5_vision"])
        return AutoModelForImageTextToText.from_pretrained(folder)


MAKERS = {
    "MiMoForCausalLM": mimo_model,
    "Qwen3NextForCausalLM": qwen3_next_model,
    "Qwen3_5ForCausalLM": qwen3_5_model,
    "Qwen3_5ForConditionalGeneration": qwen3_5_wrapper,
    "Glm4MoeForCausalLM": glm4_moe_model,
}


@pytest.fixture(scope="module", params=MAKERS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_native(tmp_path_factory.mktemp("native") / "whole", MAKERS[request.param](), request.param)


@pytest.fixture(scope="module")
def other_target() -> TargetSpec:
    """From the cache of all tests: an empty one would train the tiny model again."""
    return TargetSpec.from_pretrained(resolve_model("tiny:llama"))


@pytest.fixture
def mimo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy to damage, and an empty cache."""
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    return write_native(tmp_path / "mimo", mimo_model(), "MiMoForCausalLM")


def parts(whole: Path, tmp_path: Path) -> tuple[Path, Path]:
    policy, head = tmp_path / "policy", tmp_path / "head"
    split(whole, policy, head)
    return policy, head


def test_split_and_stitched_is_what_it_was(whole: Path, tmp_path: Path) -> None:
    policy, head = parts(whole, tmp_path)
    config, of_head = stitched(head, head)
    joined, original = load_file(policy / "model.safetensors") | of_head, load_file(whole / "model.safetensors")
    assert joined.keys() == original.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in original.items())
    assert config == json.loads((whole / "config.json").read_text())


def test_a_sharded_checkpoint_is_split_shard_by_shard(whole: Path, tmp_path: Path) -> None:
    tensors = load_file(whole / "model.safetensors")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((whole / "config.json").read_text())
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, sharded / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    from_one, from_three = parts(whole, tmp_path / "whole"), parts(sharded, tmp_path / "parts")
    heads = [load_file(head / "model.safetensors") for _, head in (from_one, from_three)]
    assert heads[0].keys() == heads[1].keys()
    index = json.loads((from_three[0] / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == load_file(from_one[0] / "model.safetensors").keys()


def test_the_head_is_a_drafter_and_the_policy_has_none_of_it(whole: Path, tmp_path: Path) -> None:
    """What the learner optimises and what the drafter trainer optimises have no tensor in common."""
    policy, head = parts(whole, tmp_path)
    assert has_native_head(whole) and not has_native_head(policy)
    drafter = load_drafter(head, TargetSpec.from_pretrained(policy), config=MtpConfig(type="mtp", trained_depth=2))
    assert drafter.shape.trained_depth == 2
    learner = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    ours, theirs = drafter.state_dict(), dict(learner.named_parameters())
    assert not ours.keys() & theirs.keys()
    original = load_file(whole / "model.safetensors")
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, original[name], rtol=0, atol=0)
    kept = load_file(policy / "model.safetensors")
    assert kept.keys() | ours.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in kept.items())


def test_a_trained_head_of_another_format_is_not_stitched_in(whole: Path, tmp_path: Path) -> None:
    policy, head = parts(whole, tmp_path)
    target = TargetSpec.from_pretrained(policy)
    other = {"model_type": "llama", "experts": None}
    if target.model_type != "qwen3_next":
        other = {"model_type": "qwen3_next", "experts": Experts(2, 1, 16, 16, True)}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    foreign = build_drafter(MtpConfig(type="mtp"), replace(target, **other, rope_parameters=plain), seed=0)
    foreign.save(tmp_path / "foreign", torch.float32)
    with pytest.raises(ValueError, match="does not belong into a"):
        stitched(tmp_path / "foreign", head)


def test_copies_of_embedding_and_output_head_are_left_out(tmp_path: Path) -> None:
    """GLM's checkpoints have them beside the head; engines read the policy's own."""
    whole = write_native(tmp_path / "whole", glm4_moe_model(), "Glm4MoeForCausalLM")
    tensors = load_file(whole / "model.safetensors")
    for copied, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"model.layers.4.{copied}.weight"] = tensors[f"{source}.weight"].clone()
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    policy, head = parts(whole, tmp_path)
    kept = load_file(policy / "model.safetensors").keys() | load_file(head / "model.safetensors").keys()
    assert tensors.keys() - kept == {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")}


def config(mimo: Path, *overrides: str) -> RunConfig:
    mtp = () if any(text.startswith("drafter.model.type") for text in overrides) else ("drafter.model.type=mtp",)
    root = mimo.parent / "runs"
    return load_config(["configs/smoke.toml"], [f"policy.model={mimo}", f"run_root={root}", *mtp, *overrides])


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_native_head_is_split_off_once_and_found_again(mimo: Path) -> None:
    model = resolve_model(str(mimo))
    head = native_head(model)
    assert model != mimo and head is not None and resolve_model(str(mimo)) == model
    assert json.loads((model / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert (model / "tokenizer.json").is_file()
    assert find_problems(config(mimo)) == []


def test_an_eagle3_beside_a_native_head_is_refused(mimo: Path) -> None:
    eagle3 = ("drafter.model.type=eagle3", "drafter.model.aux_layers=[1, 2, 3]", "drafter.model.draft_vocab_size=256")
    line, *_ = find_problems(config(mimo, *eagle3))
    assert line.startswith("drafter.model.type: ") and "brings a drafter of its own, of type" in line
    assert 'beside one of type "eagle3" would go stale as the policy moves; set type = "mtp", which trains it' in line


@pytest.fixture
def qwen3_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path / "cache"))
    return write_native(tmp_path / "next", qwen3_next_model(), "Qwen3NextForCausalLM")


IN_BFLOAT16 = "rollout.dtype=bfloat16"


def test_a_policy_with_linear_attention_and_experts_is_split_too(qwen3_next: Path) -> None:
    model = resolve_model(str(qwen3_next))
    assert native_head(model) is not None
    assert find_problems(config(qwen3_next, IN_BFLOAT16)) == []


def test_what_linear_attention_cannot_be_served_with_is_refused_at_once(qwen3_next: Path) -> None:
    cached = "rollout.vllm.enable_prefix_caching=true"
    found = find_problems(config(qwen3_next, "rollout.dtype=float32", cached))
    assert found == [
        "rollout.dtype: vLLM computes linear attention on a CPU in bfloat16 only; set it to bfloat16",
        "rollout.vllm.enable_prefix_caching: for linear attention it needs a GPU; leave it out",
    ]


def test_several_heads_are_refused(mimo: Path) -> None:
    edit(mimo, num_nextn_predict_layers=2)
    [line] = find_problems(config(mimo))
    assert line.startswith("policy.model: ") and "has 2 MTP heads (num_nextn_predict_layers)" in line


def test_a_head_of_another_model_is_refused(other_target: TargetSpec, mimo: Path, tmp_path: Path) -> None:
    build_drafter(MtpConfig(type="mtp"), other_target, seed=0).save(tmp_path / "other", torch.float32)
    edit(tmp_path / "other", intermediate_size=512)
    [line] = find_problems(config(mimo, f"drafter.init={tmp_path}/other"))
    assert "was made for another target: its intermediate_size is 512, this one's is 256" in line


def test_a_drafter_of_another_kind_is_refused(other_target: TargetSpec, mimo: Path, tmp_path: Path) -> None:
    eagle3 = Eagle3Config(type="eagle3", draft_vocab_size=64, aux_layers=(1, 2, 3))
    build_drafter(eagle3, other_target, seed=0).save(tmp_path / "eagle3", torch.float32)
    [line] = find_problems(config(mimo, f"drafter.init={tmp_path}/eagle3"))
    assert 'is a drafter of type "eagle3", but drafter.model.type is "mtp"' in line
