"""A whole run on two Ray nodes, with an engine and a rank of the learner on each, and the drafter's trainer on the second."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ROOT
from tests.engine.runs import TIMEOUT_S
from tests.engine.two_nodes import FIRST, SECOND, TwoNodes
from tests.faults.runs import compared, rows_in

pytestmark = [pytest.mark.engine, pytest.mark.long]  # nine processes; test_engines_on_two_nodes.py has engines alone

SMOKE = [str(ROOT / "configs/smoke.toml"), "rollout.num_engines=2", "policy.num_processes=2", "policy.sharding=fsdp2"]


def start(folder: Path, name: str, *arguments: str) -> "subprocess.Popen[str]":
    """A watched `cotrain train` in this folder, with the default run root."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.watched_run", "train", *arguments],
        cwd=folder,
        env=os.environ | {"WATCHED": str(folder / f"{name}.jsonl"), "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(folder: Path, name: str, *arguments: str) -> str:
    """Start it, and wait for its end. Returns its output."""
    process = start(folder, name, *arguments)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    return output


def facts(folder: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """What a run has done, without what the clock decides."""
    files = {kind: folder / "runs" / name / f"{kind}.jsonl" for kind in ("metrics", "decisions")}
    return {kind: [compared(row) for row in rows_in(file)] for kind, file in files.items()}


def served(folder: Path, name: str) -> dict[str, Any]:
    """Digests of each version, which both engines were seen to serve."""
    rows = rows_in(folder / f"{name}.jsonl")
    assert all(row["served"] == [row["sent"]] * 2 for row in rows)
    return {f"{row['update']} {row['version']}": row["sent"] for row in rows}


def test_a_run_on_two_nodes_equals_one_on_one_host(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """To the last digit. Its resume is part of the long form."""
    run(tmp_path, "one", *SMOKE, "name=one", "steps=3")
    spread = [f"cluster.address={two_nodes.address}", "cluster.strategy=SPREAD"]
    output = run(tmp_path, "two", *SMOKE, "name=two", "steps=3", *spread)
    on_each = [(role, node) for role in ("EngineActor", "PolicyActor") for node in (SECOND, FIRST)]
    assert two_nodes.roles() == [("DrafterActor", SECOND), *on_each, ("RewardActor", FIRST)]
    assert "prompts identical" in output and "DIFFERS" not in output
    assert facts(tmp_path, "two") == facts(tmp_path, "one")
    assert served(tmp_path, "two") == served(tmp_path, "one")
    assert {f"update_drafter {version}" for version in (1, 2)} <= served(tmp_path, "two").keys()
