"""`cotrain models`: what it says of a policy, and that a dry run says the most of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from cotrain.models.capability import class_in_transformers
from cotrain.models.loading import RANDOM_MODELS, resolve_model
from cotrain.models.tiny import SIZES
from pipelines.cli import main

ROOT = Path(__file__).parents[2]
ROPE = {"num_hidden_layers": 8, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """(exit status, what is printed) for a config.json with the fields of a tiny model, and others."""

    def say(name: str, **fields: Any) -> tuple[int, str]:
        table = SIZES | ROPE | RANDOM_MODELS[name]
        table |= {"architectures": [class_in_transformers(table["model_type"])]} | fields
        (tmp_path / "config.json").write_text(json.dumps(table))
        status = main(["models", str(tmp_path)])
        return status, capsys.readouterr().out

    return say


def test_the_classes_and_all_drafters_of_a_plain_family_are_named(said) -> None:
    status, text = said("qwen3")
    assert status == 0
    assert (
        "is of family qwen3: transformers trains it as Qwen3ForCausalLM, and vLLM serves it as Qwen3ForCausalLM.\n"
        in text
    )
    assert (
        "\nDrafters that can be trained for it: eagle3, dflash, mtp, draft_model. A history (rollout.history)" in text
    )
    assert "at most 2,048 positions" in text and text.count("Not ") == 1
    assert "Not dspark: only vLLM's model runner V2 drafts with it" in text


def test_what_cannot_draft_is_said_with_its_reason(said) -> None:
    status, text = said("exaone4")
    assert status == 0 and "can be trained for it: none." in text
    for kind in ("eagle3", "dflash"):
        assert f"\nNot {kind}: vLLM's class for Exaone4ForCausalLM gives no hidden states to a drafter.\n" in text
    assert "\nNot mtp: there is no checkpoint format of MTP heads for a target of model_type exaone4" in text
    assert "drafter.model.type" not in text and "use type" not in text


def test_a_family_that_only_an_mtp_head_can_draft_for_has_one(said) -> None:
    assert "Drafters that can be trained for it: mtp." in said("glm4_moe")[1]


def test_limits_are_said(said) -> None:
    assert "rollout.dtype must be bfloat16" in said("qwen3_5")[1]
    wrapper = said("qwen3_5_vision", architectures=["Qwen3_5ForConditionalGeneration"])[1]
    assert "as Qwen3_5ForConditionalGeneration.\n" in wrapper and "on text alone" in wrapper and "bfloat16" in wrapper
    assert "It needs a GPU: the router" in said("minimax_m2")[1]


def test_a_policy_that_cannot_be_trained_has_status_1(said) -> None:
    status, text = said("nemotron_h")
    assert status == 1 and text.count("\n") == 1 and "cannot be trained: model_type nemotron_h is refused" in text
    status, text = said("qwen3", quantization_config={"quant_method": "awq"})
    assert status == 1 and "the weights are quantized (awq)" in text


def test_a_model_with_an_mtp_head_is_what_it_is_without(said) -> None:
    status, text = said("qwen2", architectures=["MiMoForCausalLM"], model_type="mimo")
    assert status == 0 and "is of family qwen2: transformers trains it as Qwen2ForCausalLM" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny:nothing", "unknown model 'tiny:nothing'; cotrain brings bundled:"),
        ("no/such/folder", "no/such/folder is not on this machine; give a folder with a config.json, or a hub id"),
        ("nobody/no-model", "nobody/no-model is not on this machine; `hf download nobody/no-model config.json` gets"),
    ],
)
def test_a_name_that_leads_nowhere_is_answered_with_the_fix(name: str, message: str, capsys) -> None:
    assert main(["models", name]) == 2
    assert capsys.readouterr().err.startswith(f"cotrain: {message}")


def test_a_dry_run_says_the_most_of_it(capsys, tmp_path: Path) -> None:
    folder = resolve_model("tiny:llama")
    arguments = ["--dry-run", f"run_root={tmp_path}", f"policy.model={folder}"]
    assert main(["train", str(ROOT / "configs/smoke.toml"), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"# {folder} is of family llama: transformers trains it as LlamaForCausalLM, and" in "\n".join(lines)
    assert (
        sum(
            line.startswith("# Drafters that can be trained for it: eagle3, dflash, mtp, draft_model.")
            for line in lines
        )
        == 1
    )
