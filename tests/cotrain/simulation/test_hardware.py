"""Data of GPUs and models: where each number comes from, and shapes against what their cards state."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain.simulation.roofline import Kernel, hardware, model, tables

FILES = ("hardware", "models", "paper", "h100_surface", "cpu")
GPUS, MODELS = tables("hardware"), tables("models")


def without_source(table: dict[str, Any], path: str, sourced: bool) -> Iterator[str]:
    """Numbers in a table that neither it nor one around it gives a source for."""
    sourced = sourced or bool(table.get("source"))
    for name, value in table.items():
        if isinstance(value, dict):
            yield from without_source(value, f"{path}.{name}", sourced)
        elif not isinstance(value, str) and not sourced:
            yield f"{path}.{name}"


@pytest.mark.parametrize("file", FILES)
def test_every_number_has_a_source(file: str) -> None:
    assert list(without_source(tables(file), file, sourced=False)) == []


@pytest.mark.parametrize("name", GPUS)
def test_what_is_not_of_the_data_sheet_was_fitted_with_a_stated_error(name: str) -> None:
    gpu = hardware(name)
    kernels: list[Kernel] = [
        *gpu.gemm.values(),
        *gpu.experts.values(),
        *gpu.attention.values(),
        *gpu.all_reduce.values(),
    ]
    assert len(kernels) >= 8
    for kernel in kernels:
        assert "AIConfigurator" in kernel.source and kernel.error["cells"] >= 16
        assert 0 < kernel.error["mean"] < 0.22 and kernel.error["mean"] <= kernel.error["p90"]
        assert 0 < kernel.bandwidth_efficiency <= 1 and 0 < kernel.flops_efficiency <= 1  # not faster than light
    assert gpu.gemm["bf16"].error["mean"] < 0.12
    assert max(k.error["mean"] for k in (gpu.experts["bf16"], gpu.attention["bf16"])) < 0.17


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_models_card(name: str) -> None:
    policy = model(name)
    assert policy.total_parameters / 1e9 == pytest.approx(policy.parameters, rel=0.015)
    assert policy.active_parameters <= policy.total_parameters


def test_known_sizes_of_models_and_drafters() -> None:
    """Active parameters: 30B-A3B and 235B-A22B say them, with the embedding that no token is multiplied with."""
    for name, active in (("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22.0)):
        policy = model(name)
        embedding = policy.vocabulary * policy.hidden
        assert (policy.active_parameters + embedding) / 1e9 == pytest.approx(active, rel=0.03)
    assert model("Qwen3-8B").kv_bytes == 147_456
    assert model("Qwen3-235B-A22B-FP8").kv_bytes == model("Qwen3-235B-A22B").kv_bytes / 2 == 96_256
    small, large = (model("Qwen3-8B").drafter(kind).total_parameters for kind in ("eagle3", "mtp"))
    assert small / 1e9 == pytest.approx(0.40, abs=0.005)
    assert large - small > 0.4e9  # the head over the whole vocabulary


@pytest.mark.parametrize(("load", "known"), [(hardware, GPUS), (model, MODELS)])
def test_an_unknown_name_is_answered_with_the_known_ones(load: Any, known: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no \w+ 'h-100'") as error:
        load("h-100")
    assert all(name in str(error.value) for name in known)


SHARED = {"num_attention_heads": 32, "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": False}
CONFIGS = {
    "Qwen3-8B": SHARED
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12288},
    "Qwen3-30B-A3B": SHARED
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "intermediate_size": 6144}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_that_is_not_listed_is_described_by_its_config(name: str, nested: bool, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": CONFIGS[name]} if nested else CONFIGS[name]))
    changes = {"name": name, "source": "", "parameters": 0.0}
    for path in (file, tmp_path):
        assert replace(model(str(path)), **changes) == replace(model(name), **changes)


def test_a_hub_id_is_the_model_of_its_card() -> None:
    assert model("Qwen/Qwen3-8B") == model("Qwen3-8B")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"kv_lora_rank": 512, "n_shared_experts": 1}, "has kv_lora_rank, n_shared_experts, which is not modelled"),
        (
            {"hidden_size": 8, "num_attention_heads": 2},
            "lacks num_hidden_layers, vocab_size, intermediate_size; give the config.json of a decoder",
        ),
    ],
)
def test_a_model_that_cannot_be_described_is_refused(config: dict[str, int], line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"^cost\.model: .* {line}"):
        model(str(tmp_path))
    with pytest.raises(ValueError, match=r"no model 'org/other'.*the path of another model's config\.json"):
        model("org/other")
