"""`cotrain init` as a user runs it, Ctrl-C and resume included."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.run.mlflow_store import absolute_uri
from cotrain.run.registry import list_drafters
from cotrain.run.rows import read_rows

pytestmark = pytest.mark.engine

SETTINGS = (
    "configs/smoke.toml", "name=first", "steps=6", "drafter.updates_per_step=6", "drafter.optimizer.learning_rate=3e-3",
)  # fmt: skip
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def stopped_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """(run folder, output until Ctrl-C, output of the resume)."""
    root = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-u", "-m", "pipelines.cli", "init"]
    process = subprocess.Popen(
        [*command, *SETTINGS, f"run_root={root}"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    stopped = ""
    for line in process.stdout:
        stopped += line
        if line.startswith("step 1/"):
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the command
    rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stopped + rest
    resumed = subprocess.run(
        [*command, "--resume", "first", f"run_root={root}"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    return root / "first", stopped + rest, resumed.stdout


def test_ctrl_c_keeps_the_steps_and_a_resume_finishes(stopped_and_resumed: tuple[Path, str, str]) -> None:
    run, stopped, resumed = stopped_and_resumed
    assert "stopping after this step" in stopped and "cotrain init --resume first" in stopped
    assert [row["step"] for row in read_rows(run / "rollouts.jsonl")] == [*range(1, 7)]
    assert "step 1/6" not in resumed and re.search(r"step 6/6 .*p0 d6 .*loss ", resumed)
    assert "covers 100.00% of fresh response tokens" in resumed
    assert f"drafter.init={run}/drafter" in resumed
    assert "WARNING" not in resumed


def test_the_drafter_is_better_served_and_registered(stopped_and_resumed: tuple[Path, str, str]) -> None:
    run, _, _ = stopped_and_resumed
    figures = json.loads((run / "init.json").read_text())
    rows = read_rows(run / "metrics.jsonl")
    lengths = [row["rollout/expected_acceptance_length"] for row in rows]
    assert figures["expected_acceptance_length"] > lengths[0] + 0.05
    assert figures["served_acceptance_length"] > 1.05
    (row,) = list_drafters(absolute_uri(f"sqlite:///{run.parent}/mlflow.db"))
    assert float(row.tags["expected_acceptance_length"]) == pytest.approx(
        figures["expected_acceptance_length"], abs=1e-4
    )
    assert row.aliases == ["best", "serving"]
    assert [row["step"] for row in rows] == list(range(1, figures["steps"] + 1))
