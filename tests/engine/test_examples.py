"""The minimal loop of examples/, as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


def test_the_minimal_loop_trains_both_models_and_changes_no_text() -> None:
    command = [sys.executable, "examples/minimal_loop.py", "configs/smoke.toml", "steps=2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    versions = re.findall(r"^step \d/2 .* (p\d-d\d) -> (p\d-d\d) ", run.stdout, re.MULTILINE)
    assert versions == [("p0-d0", "p1-d0"), ("p1-d0", "p2-d1")]
    assert "greedy output with and without speculation: 4/4 prompts identical" in run.stdout
