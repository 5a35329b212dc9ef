"""`cotrain verify` as a command: with a history, with a drafter's folder, and with the head that a policy brings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.runs import TIMEOUT_S

pytestmark = pytest.mark.engine


def verify(out: Path, *arguments: str) -> tuple[str, set[str]]:
    """What it prints, and the checks of its report, in which nothing may be wrong."""
    command = [sys.executable, "-m", "pipelines.cli", "verify", *arguments, "--k", "2", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr + run.stdout
    report = json.loads((out / "verify.json").read_text())
    assert report["passed"] and report["smallest_adjusted_p"] > report["false_alarm_rate"]
    return run.stdout, {row["check"] for row in report["checks"]}


@pytest.mark.long  # test_verify_engine.py has the checks of a drafter, and test_suffix_engine.py those of a history
@pytest.mark.parametrize("proposer", ["drafter", "history"])
def test_the_command_verifies_and_says_so(proposer: str, drafter_folder: Path, tmp_path: Path) -> None:
    drafts = ["--history"] if proposer == "history" else ["--drafter", str(drafter_folder)]
    arguments = ["--model", "tiny:llama", *drafts, "--dtype", "float32"]
    printed, _ = verify(tmp_path / "verify", *arguments, "--distance", "0.3", "--alpha", "0.0001")
    assert "lossless: " in printed and " left" in printed


@pytest.mark.long
def test_speculation_with_a_native_head_is_lossless(qwen3_next_folder: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(qwen3_next_folder), "--drafter", "native", "--dtype", "bfloat16"]
    _, checks = verify(tmp_path / "verify", *arguments, "--distance", "0.3")
    assert {"identity", "support", "returned log-probs"} < checks
