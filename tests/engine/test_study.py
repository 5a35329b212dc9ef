"""A whole study through the command line: the baseline without a drafter, and in the long form a co-trained arm beside it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.ablate.conftest import study_file  # noqa: F401

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("co_trained", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_study_runs_to_its_report(co_trained: bool, study_file: Path, tmp_path: Path) -> None:  # noqa: F811
    base = study_file.with_name("base.toml")
    base.write_text(base.read_text().replace("steps = 3", "steps = 1"))
    text = study_file.read_text()
    first = "random" if co_trained else "no speculation"
    study_file.write_text(text[: text.index("[inits.")] + text[text.index(f'[[arms]]\nname = "{first}') :])
    command = [sys.executable, "-m", "pipelines.cli", "ablate", str(study_file), "seeds=[0]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "studies" / "first"
    state = json.loads((folder / "study.json").read_text())
    assert [run["status"] for arm in state["arms"] for run in arm["runs"]] == ["finished"] * (1 + co_trained)
    assert f"| {first}" in (folder / "report/report.md").read_text()
    if co_trained:
        [row] = rows_of(folder / "runs/random-co-trained-s0")
        assert row["rollout/acceptance_length"] >= 1 and row["versions/policy"] == 0
    [row] = rows_of(folder / "runs/no-speculation-s0")
    assert "rollout/acceptance_length" not in row and "policy/loss" not in row
    told = json.loads((folder / "runs/no-speculation-s0/steps.jsonl").read_text())
    steps = told["engines"]["0"]
    assert (
        told["acceptance"] == []
        and {k for k, *_ in steps} == {0}
        and {step[2] for step in steps} >= {"prompts", "steady"}
    )
    assert sum(step[4] for step in steps) == row["rollout/generated_tokens"]
    assert 0 < sum(step[5] for step in steps) < row["time/generate_s"]

    again = subprocess.run(command, capture_output=True, text=True, timeout=420)
    assert again.returncode == 0 and "no speculation, seed 0: finished" in again.stdout, again.stdout + again.stderr


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
