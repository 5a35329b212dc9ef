"""A policy that brings an MTP head: a whole run on it, and its export in stock vLLM as one model."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cotrain.run.mlflow_store import absolute_uri
from cotrain.run.registry import list_drafters, pull_drafter
from tests.engine.test_runs import train

pytestmark = pytest.mark.engine

TIMEOUT_S = 420


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_stock_vllm(model: Path, dtype: str, num_speculative_tokens: int) -> dict[str, Any]:
    script = Path(__file__).with_name("stock_vllm.py")
    lines = run(str(script), str(model), dtype, str(num_speculative_tokens)).splitlines()
    found: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return found


@dataclass
class Native:
    """A whole checkpoint of a policy and its head, as its makers store them."""

    folder: Path
    architecture: str
    served_alone: str
    """Architecture of the head as a drafter of its own."""
    dtype: str
    """What vLLM's CPU build serves it in."""


@pytest.fixture(scope="module", params=["mimo", "qwen3_next"])
def native(request: pytest.FixtureRequest) -> Native:
    folder = request.getfixturevalue(f"{request.param}_folder")
    if request.param == "mimo":
        return Native(folder, "MiMoForCausalLM", "MiMoForCausalLM", "float32")
    return Native(folder, "Qwen3NextForCausalLM", "Qwen3NextMTP", "bfloat16")


@pytest.fixture(scope="module")
def finished(native: Native, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(run root, what the run printed)."""
    root = tmp_path_factory.mktemp("runs")
    model = [f"policy.model={native.folder}", f"rollout.dtype={native.dtype}"]
    return root, train(root, "configs/smoke.toml", "drafter.model.type=mtp", "drafter.updates_per_step=20", *model)


def test_a_run_trains_publishes_and_registers_the_native_head(native: Native, finished: tuple[Path, str]) -> None:
    root, output = finished
    assert "mtp from the policy's own head" in output and "greedy output identical with and without" in output
    first = load_file(root / "smoke" / "drafters" / "v0000" / "model.safetensors")
    original = load_file(native.folder / "model.safetensors")
    assert all(torch.equal(tensor, original[name].to(tensor.dtype)) for name, tensor in first.items())
    drafters = list_drafters(absolute_uri(f"sqlite:///{root}/mlflow.db"))
    assert [row.tags["drafter_version"] for row in drafters] == ["2", "1"]
    pulled = root / "pulled"
    pull_drafter(absolute_uri(f"sqlite:///{root}/mlflow.db"), f"{drafters[0].name}@serving", pulled)
    assert json.loads((pulled / "config.json").read_text())["architectures"] == [native.served_alone]
    trained = load_file(pulled / "model.safetensors")
    assert trained.keys() == first.keys() and any(not torch.equal(trained[name], first[name]) for name in first)


def test_it_resumes(finished: tuple[Path, str]) -> None:
    root, _ = finished
    assert "Done: 4 of 4 steps" in train(root, "--resume", "smoke", "steps=4")


def test_the_export_is_one_model_that_stock_vllm_speculates_with(
    native: Native, finished: tuple[Path, str], tmp_path: Path
) -> None:
    root, _ = finished
    out = tmp_path / "exported"
    printed = run("-m", "pipelines.cli", "export", str(root / "smoke"), str(out))
    assert "in the same folder" in printed and '"method": "mtp"' in printed
    assert json.loads((out / "config.json").read_text())["architectures"] == [native.architecture]
    plain, speculated = in_stock_vllm(out, native.dtype, 0), in_stock_vllm(out, native.dtype, 2)
    same = sum(a == b for a, b in zip(plain["tokens"], speculated["tokens"], strict=True))
    # In bfloat16 two tokens can be equally likely up to rounding, and rounding depends on what is verified together.
    assert same >= (8 if native.dtype == "float32" else 6) and plain["drafts"] is None
    assert speculated["drafts"] > 0 and speculated["accepted"] > 0


def test_verify_finds_speculation_with_the_native_head_lossless(native: Native, tmp_path: Path) -> None:
    arguments = ["--model", str(native.folder), "--drafter", "native", "--dtype", native.dtype]
    arguments += ["--distance", "0.3", "--k", "2"]
    run("-m", "pipelines.cli", "verify", *arguments, "--out", str(tmp_path / "verify"))
    report = json.loads((tmp_path / "verify" / "verify.json").read_text())
    assert report["passed"] and report["alarms"] == 0
    assert {"identity", "support", "returned log-probs"} < {row["check"] for row in report["checks"]}
