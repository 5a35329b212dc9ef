"""`cotrain bench` as a user runs it: real engines on the tiny Llama, one for each kind of arms."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

TOKENS, ROUNDS, GROUPS = 12, 2, 2
FIXED = ["suffix", "greedy", "probabilistic", "mixed"]


@pytest.mark.parametrize(
    "fixed", [["mixed"], pytest.param(FIXED, marks=pytest.mark.long)], ids=["two engines", "five engines"]
)
def test_bench_measures_every_arm(fixed: list[str], drafter_folder: Path, tmp_path: Path) -> None:
    """Draft lengths that are fixed, and those that are chosen for history and drafter together."""
    out = tmp_path / "bench"
    command = [
        *(sys.executable, "-m", "pipelines.cli", "bench", "--model", "tiny:llama", "--drafter", str(drafter_folder)),
        *("--methods", *fixed, "adaptive-mixed"),
        *("--k", "1", "2", "--batch", "1", "3"),
        *("--tokens", str(TOKENS), "--rounds", str(ROUNDS), "--groups", str(GROUPS)),
        *("--dtype", "float32", "--same-prompts", "--out", str(out)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr
    assert f"round {ROUNDS}/{ROUNDS}: about 0s left" in run.stdout
    assert (out / "bench.md").read_text() in run.stdout

    report = json.loads((out / "bench.json").read_text())
    arms = ["no speculation", *(f"{method} k={k}" for method in fixed for k in (1, 2)), "adaptive-mixed k<=2"]
    assert [arm["arm"] for arm in report["arms"]] == [f"batch {batch}, {arm}" for batch in (1, 3) for arm in arms]
    assert all(arm["+-"] is not None and arm["min"] <= arm["ratio"] <= arm["max"] for arm in report["arms"])
    assert len(report["turns"]) == 2 * len(arms) * ROUNDS * GROUPS
    for turn in report["turns"]:
        assert turn["num_tokens"] == turn["batch"] * (TOKENS - 1)
        assert turn["timed_tokens"] > 0 and turn["seconds"] > 0
        if turn["arm"] == "no speculation":
            assert turn["num_drafts"] == 0
        elif turn["arm"].startswith(("greedy", "probabilistic")):
            assert turn["num_drafts"] > 0
            assert len(turn["accepted_per_position"]) == int(turn["arm"][-1])
    for proposer in ("history", "drafter"):
        drafted = (turn["by_proposer"].get(f"{proposer}/drafted_tokens", 0) for turn in report["turns"])
        assert sum(drafted) > 0
    assert any(note.startswith("adaptive-mixed, at the end: ") for note in report["notes"])
    assert report["packages"]["torch"] and report["machine"]["cores"] >= 1
