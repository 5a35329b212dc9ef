"""What `cotrain export` writes, without a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cotrain.models.loading import resolve_model
from cotrain.policy.learner import PolicyLearner
from drafters.files import text_tensors, weight_files
from pipelines.export import command


@pytest.mark.parametrize(("dtype", "train"), [("bfloat16", True), ("float32", True), ("bfloat16", False)])
def test_the_policy_has_the_number_format_that_it_was_served_in(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, train: bool
) -> None:
    """A checkpoint keeps float32, which stock vLLM would cast with hundreds of warnings, and no policy that does not train."""
    model = resolve_model("tiny:llama")
    run = tmp_path / "run"
    policy = run / "checkpoints" / "step_000001" / "policy"
    shutil.copytree(model, policy)
    config = run_config(policy={"model": str(model), "train": train}, rollout={"dtype": dtype}, drafter=None)
    (run / "config.json").write_text(config.model_dump_json())
    (policy.parent / "state.json").write_text(json.dumps({"versions": {"policy": 1, "drafter": 0}}))
    monkeypatch.setattr(command, "find_defect", lambda folder: None)
    if not train:
        (policy / "model.safetensors").unlink()
    assert command.main([str(run), str(tmp_path / "out")]) == 0
    exported, trained = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", model))
    for name, tensor in trained.items():
        assert torch.equal(exported[name], tensor.to(getattr(torch, dtype)))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "config.json"}
    (tmp_path / "any").touch()
    written = tmp_path / "out" / "model.safetensors"
    assert written.stat().st_mode == (tmp_path / "any").stat().st_mode, "others may read it"


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_exported_as_they_are_or_merged(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], merged: bool
) -> None:
    """Both are the same policy to transformers and peft."""
    model, run = resolve_model("tiny:llama"), tmp_path / "run"
    lora = {"rank": 4, "alpha": 8.0}
    config = run_config(policy={"model": str(model), "lora": lora}, rollout={"dtype": "float32"}, drafter=None)
    learner = PolicyLearner(config.policy, config.rollout, str(model), 1)
    with torch.no_grad():
        for name, parameter in learner._policy.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    learner.save(run / "checkpoints" / "step_000001" / "policy")
    (run / "config.json").write_text(config.model_dump_json())
    (run / "checkpoints" / "step_000001" / "state.json").write_text('{"versions": {"policy": 1, "drafter": 0}}')
    monkeypatch.setattr(command, "find_defect", lambda folder: None)
    out = tmp_path / "out"
    assert command.main([str(run), str(out), *["--merged"] * merged]) == 0
    tokens = torch.tensor([[3, 5, 7, 11]])
    expected = learner._policy.model(tokens).logits
    loaded = AutoModelForCausalLM.from_pretrained(out if merged else model, dtype=torch.float32)
    if not merged:
        assert not (out / "model.safetensors").exists()
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
        loaded = PeftModel.from_pretrained(loaded, out)
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_what_a_wrapper_holds_besides_its_language_model_is_exported_as_it_came(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = resolve_model("tiny:qwen3_5_vision"), tmp_path / "run"
    whole = load_file(model / "model.safetensors")
    policy = run / "checkpoints" / "step_000001" / "policy"
    policy.mkdir(parents=True)
    shutil.copyfile(model / "config.json", policy / "config.json")
    trained = {name: whole[name] + 1 for name in text_tensors(model, whole)}
    assert 0 < len(trained) < len(whole) and not any("visual" in name for name in trained)
    save_file(trained, policy / "model.safetensors", metadata={"format": "pt"})
    config = run_config(policy={"model": str(model)}, drafter=None)
    (run / "config.json").write_text(config.model_dump_json())
    (policy.parent / "state.json").write_text(json.dumps({"versions": {"policy": 1, "drafter": 0}}))
    monkeypatch.setattr(command, "find_defect", lambda folder: None)
    assert command.main([str(run), str(tmp_path / "out")]) == 0
    exported = {name: tensor for file in weight_files(tmp_path / "out") for name, tensor in load_file(file).items()}
    assert exported.keys() == whole.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, trained.get(name, whole[name]).to(tensor.dtype))
