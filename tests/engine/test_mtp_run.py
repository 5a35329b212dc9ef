"""A policy that brings an MTP head: a whole run on it, and its export in stock vLLM as one model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cotrain.registry import list_drafters, pull_drafter
from cotrain.store_uri import absolute_uri
from tests.engine.test_runs import train
from tests.native_models import mimo_model, write_native

pytestmark = pytest.mark.engine

TIMEOUT_S = 420


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_stock_vllm(model: Path, draft_tokens: int, dtype: str = "float32") -> dict[str, Any]:
    script = Path(__file__).with_name("stock_vllm.py")
    lines = run(str(script), str(model), dtype, str(draft_tokens)).splitlines()
    found: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return found


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_native(tmp_path_factory.mktemp("mimo") / "whole", mimo_model(), "MiMoForCausalLM", trained=True)


@pytest.fixture(scope="module")
def finished(native: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(run root, what the run printed)."""
    root = tmp_path_factory.mktemp("runs")
    overrides = ["drafter.model.type=mtp", f"policy.model={native}", "drafter.updates_per_step=20"]
    return root, train(root, "configs/smoke.toml", *overrides)


def test_a_run_trains_publishes_and_registers_the_native_head(native: Path, finished: tuple[Path, str]) -> None:
    root, output = finished
    assert "mtp from the policy's own head" in output and "greedy output with and without speculation" in output
    first = load_file(root / "smoke" / "drafters" / "v0000" / "model.safetensors")
    original = load_file(native / "model.safetensors")
    assert all(torch.equal(tensor, original[name]) for name, tensor in first.items())
    drafters = list_drafters(absolute_uri(f"sqlite:///{root}/mlflow.db"))
    assert [row.drafter_version for row in drafters] == [2, 1]
    pulled = root / "pulled"
    pull_drafter(absolute_uri(f"sqlite:///{root}/mlflow.db"), f"{drafters[0].name}@serving", pulled)
    assert json.loads((pulled / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]
    trained = load_file(pulled / "model.safetensors")
    assert trained.keys() == first.keys() and any(not torch.equal(trained[name], first[name]) for name in first)


def test_it_resumes(finished: tuple[Path, str]) -> None:
    root, _ = finished
    assert "Done: 4 of 4 steps" in train(root, "--resume", "smoke", "steps=4")


def test_the_export_is_one_model_that_stock_vllm_speculates_with(finished: tuple[Path, str], tmp_path: Path) -> None:
    root, _ = finished
    out = tmp_path / "exported"
    printed = run("-m", "pipelines.cli", "export", str(root / "smoke"), str(out))
    assert "in the same folder" in printed and '"method": "mtp"' in printed
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]
    plain, speculated = in_stock_vllm(out, 0), in_stock_vllm(out, 2)
    assert plain["tokens"] == speculated["tokens"] and plain["drafts"] is None
    assert speculated["drafts"] > 0 and speculated["accepted"] > 0


def test_verify_finds_speculation_with_the_native_head_lossless(native: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(native), "--drafter", "native", "--dtype", "float32", "--distance", "0.3", "--k", "2"]
    run("-m", "pipelines.cli", "verify", *arguments, "--out", str(tmp_path / "verify"))
    report = json.loads((tmp_path / "verify" / "verify.json").read_text())
    assert report["passed"] and report["alarms"] == 0
    assert {"identity", "support", "log-prob", "returned log-probs"} < {row["check"] for row in report["checks"]}
