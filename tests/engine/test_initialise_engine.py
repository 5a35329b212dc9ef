"""`cotrain init` as a user runs it. Stopping and resuming are those of `cotrain train`, which test_stopped_runs.py tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.run.mlflow_store import absolute_uri
from cotrain.run.registry import list_drafters
from cotrain.run.rows import read_rows
from drafters.base import TargetSpec
from drafters.build import load_drafter

pytestmark = pytest.mark.engine

SETTINGS = (
    "configs/smoke.toml",
    "name=first",
    "steps=6",
    "drafter.updates_per_step=6",
    "drafter.optimizer.learning_rate=3e-3",
)
TIMEOUT_S = 300


def test_a_drafter_gets_better_on_a_policy_that_stays_as_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelines.cli", "init", *SETTINGS, f"run_root={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "first"
    assert f"cotrain train CONFIG drafter.init={run}/drafter" in ended.stdout and "WARNING" not in ended.stdout
    rows = read_rows(run / "metrics.jsonl")
    assert [(row["versions/policy"], row["versions/drafter"]) for row in rows] == [(0, max(0, i - 1)) for i in range(6)]
    expected, served = ([row[f"rollout/{name}acceptance_length"] for row in rows] for name in ("expected_", ""))
    assert expected[-1] > expected[0] + 0.05 and served[-1] > 1.05
    newest, *_ = list_drafters(absolute_uri(f"sqlite:///{tmp_path}/mlflow.db"))
    assert "serving" in newest.aliases and newest.tags["policy_version"] == "0"
    from cotrain.models.loading import resolve_model

    drafter = load_drafter(run / "drafter", TargetSpec.from_pretrained(resolve_model("tiny:llama")))
    assert drafter.serving.method == "eagle3"
    checkpoint = run / "checkpoints" / "step_000006"
    assert (checkpoint / "drafter").is_dir() and not list((checkpoint / "policy").glob("*.safetensors"))
