"""Hosts with LoRA adapters and with quantised weights: what is tapped, that a drafter is swapped in, and that greedy text stays."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafters.base import Drafter
from tests.engine.sidecar_host import running_host
from tests.engine.test_sidecar_engine import IN_PROCESS, TOKENS, Sidecar, prompts, versions_of
from tests.sidecar_parts import host_environment, make_spool

pytestmark = pytest.mark.engine

GREEDY = {"max_tokens": TOKENS, "temperature": 0.0}


@contextmanager
def beside(folder: Path, model: Path, drafter: Drafter, *options: str, **settings: object) -> Iterator[Sidecar]:
    spool = make_spool(folder / "spool", model, drafter, max_bytes=2**24, **settings)
    with running_host(model, host_environment(folder, spool) | IN_PROCESS, "reports often", *options) as host:
        yield Sidecar(host, spool)


def greedy_text(folder: Path, model: Path, *options: str, adapter: str | None = None) -> list[list[int]]:
    """Of the same host without a sidecar."""
    with running_host(model, host_environment(folder, None) | IN_PROCESS, "alone", *options) as host:
        return host("generate", prompts(8, 1), GREEDY, adapter)


@pytest.fixture(scope="module")
def adapter(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.02)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


def test_one_adapters_requests_are_tapped_and_the_drafter_drafts_for_all(
    target_folder: Path, adapter: Path, untrained_drafter: Drafter, fitted_drafter: Drafter, tmp_path: Path
) -> None:
    option = f"adapter={adapter}"
    expected = greedy_text(tmp_path, target_folder, option, adapter="words")
    with beside(tmp_path, target_folder, untrained_drafter, option, adapter="words") as sidecar:
        assert sidecar.state.reason is None
        texts = sidecar.host("generate", prompts(8, 1), GREEDY, "words")
        base = sidecar.greedy()
        sidecar.settle()
        assert texts == expected and base != texts
        taken = sidecar.take()
        assert sorted(record.token_ids[12:].tolist() for record, _ in taken) == sorted(texts)
        assert {versions_of(record) for record, _ in taken} == {(0, 0)}
        assert sidecar.state.dropped["without an adapter"] >= 8
        version = sidecar.publish(fitted_drafter.state_for_serving())
        assert sidecar.host("generate", prompts(8, 1), GREEDY, "words") == texts
        assert sidecar.greedy() == base
        sidecar.settle()
        counts = sidecar.state.counts
        assert sidecar.state.drafter_version == version and sidecar.state.reason is None
        assert counts["drafts/"] + counts["drafts/words"] == counts["drafts"] and counts["accepted/"] > 0


def quantised(model: Path, folder: Path) -> Path:
    """The same model with int8 projections (compressed-tensors)."""
    shutil.copytree(model, folder)
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True).float() / 127
            tensors |= {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kinds = {"num_bits": 8, "type": "int", "symmetric": True}
    weights, inputs = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": kinds | weights, "input_activations": kinds | inputs}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_quantised_host_gets_a_plain_drafter(
    target_folder: Path, untrained_drafter: Drafter, fitted_drafter: Drafter, tmp_path: Path
) -> None:
    model = quantised(target_folder, tmp_path / "model")
    expected = greedy_text(tmp_path, model)
    with beside(tmp_path, model, untrained_drafter) as sidecar:
        assert sidecar.state.reason is None
        assert sidecar.greedy() == expected
        sidecar.settle()
        taken = sidecar.take()
        assert sorted(r.token_ids[12:].tolist() for r, _ in taken if r.num_tokens == 12 + TOKENS) == sorted(expected)
        head = load_file(sidecar.engine.policies / "0.safetensors")["lm_head.weight"]
        for record, _ in taken:  # the head makes of the engine's own hidden states what the engine chose
            last = record.final_hidden[11:-1].float() @ head.T
            assert (last.argmax(1) == record.token_ids[12:]).float().mean() > 0.95
        length = sidecar.acceptance_length(5)
        version = sidecar.publish(fitted_drafter.state_for_serving())
        assert sidecar.greedy() == expected
        assert sidecar.acceptance_length(5) > length + 0.2
        sidecar.settle()
        assert sidecar.state.drafter_version == version and sidecar.state.reason is None
