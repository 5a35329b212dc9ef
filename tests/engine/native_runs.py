"""What a run on a policy with an MTP head of its own must do, for a test file of each kind of policy."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cotrain.run.mlflow_store import absolute_uri
from cotrain.run.registry import list_drafters, pull_drafter
from pipelines.cli import main
from tests.engine.runs import TIMEOUT_S, metrics_of, train


def check_served_by_stock_vllm(model: Path, dtype: str, printed: str) -> None:
    """Stock vLLM speculates with an exported model by the options that `cotrain export` printed, and its greedy text stays as it is."""
    found = re.search(r"--speculative-config '(.+?)'", printed)
    assert found, printed
    script = Path(__file__).with_name("stock_vllm.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model), dtype, found[1]], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain, speculated = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    same = sum(a == b for a, b in zip(plain["tokens"], speculated["tokens"], strict=True))
    # In bfloat16 two tokens can be equally likely up to rounding, and rounding depends on what is verified together.
    assert same >= (8 if dtype == "float32" else 6) and plain["drafts"] is None
    assert speculated["drafts"] > 0 and speculated["accepted"] > 0


@dataclass
class Native:
    """A whole checkpoint of a policy and its head, as its makers store them."""

    folder: Path
    architecture: str
    served_alone: str
    """Architecture of the head as a drafter of its own."""
    dtype: str
    """What vLLM's CPU build serves it in."""


def run_on(native: Native, root: Path) -> str:
    """A run of three steps in this run root; what it prints."""
    model = [f"policy.model={native.folder}", f"rollout.dtype={native.dtype}", "rollout.max_new_tokens=48"]
    return train(root, "configs/smoke.toml", "drafter.model.type=mtp", "drafter.updates_per_step=60", *model)


def check_training(native: Native, root: Path, output: str) -> None:
    """The run trains, publishes and registers the native head, whose drafts are then worth their time."""
    lengths = [row["rollout/acceptance_length"] for row in metrics_of(root, "smoke")]
    assert lengths[0] < 1.3 and lengths[-1] > 1.5, lengths
    words = " ".join(output.split())
    assert "mtp from the policy's own head" in words and "greedy output identical with and without" in words
    first = load_file(root / "smoke" / "drafters" / "v0000" / "model.safetensors")
    original = load_file(native.folder / "model.safetensors")
    assert all(torch.equal(tensor, original[name].to(tensor.dtype)) for name, tensor in first.items())
    uri = absolute_uri(f"sqlite:///{root}/mlflow.db")
    drafters = list_drafters(uri)
    assert [row.tags["drafter_version"] for row in drafters] == ["2", "1"]
    pulled = root / "pulled"
    pull_drafter(uri, f"{drafters[0].name}@serving", pulled)
    assert json.loads((pulled / "config.json").read_text())["architectures"] == [native.served_alone]
    trained = load_file(pulled / "model.safetensors")
    assert trained.keys() == first.keys() and any(not torch.equal(trained[name], first[name]) for name in first)


def check_export(native: Native, root: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The export is one model that stock vLLM speculates with."""
    assert main(["export", str(root / "smoke"), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "in the same folder" in printed and '"method": "mtp"' in printed
    assert json.loads((out / "config.json").read_text())["architectures"] == [native.architecture]
    check_served_by_stock_vllm(out, native.dtype, printed)
