"""A whole study through the command line: a co-trained arm and the baseline without a drafter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
STUDY = """
name = "tiny"
config = ["smoke.toml"]
folder = "{folder}"

[[arms]]
name = "random, co-trained"
init = "none"
online = true

[[arms]]
name = "no speculation"
speculation = false
policy = "frozen"
"""


def test_a_study_runs_to_its_report(tmp_path: Path) -> None:
    smoke = (ROOT / "configs" / "smoke.toml").read_text()
    (tmp_path / "smoke.toml").write_text(smoke.replace("steps = 3", "steps = 1"))
    (tmp_path / "study.toml").write_text(STUDY.format(folder=tmp_path / "studies"))
    command = [sys.executable, "-m", "pipelines.cli", "ablate", str(tmp_path / "study.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "studies" / "tiny"
    state = json.loads((folder / "study.json").read_text())
    assert [run["status"] for arm in state["arms"] for run in arm["runs"]] == ["finished", "finished"]
    assert "random" in (folder / "report/table.md").read_text() and (folder / "report/report.html").is_file()
    [row] = [json.loads(line) for line in (folder / "runs/random-co-trained-s0/metrics.jsonl").read_text().splitlines()]
    assert row["rollout/acceptance_length"] >= 1 and row["versions/policy"] == 0
    [row] = [json.loads(line) for line in (folder / "runs/no-speculation-s0/metrics.jsonl").read_text().splitlines()]
    assert "rollout/acceptance_length" not in row and "policy/loss" not in row

    again = subprocess.run(command, capture_output=True, text=True, timeout=420)
    assert again.returncode == 0 and "seed 0 finished" in again.stdout, again.stdout + again.stderr
