"""`cotrain bench` as a user runs it: real engines on the tiny Llama, one for each kind of arms."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]
"""test_bench_synthetic.py has the same arms, turns and report in `make test`."""

TOKENS, ROUNDS, GROUPS = 12, 2, 2
FIXED = ["suffix", "greedy", "probabilistic"]


def test_bench_measures_every_arm(drafter_folder: Path, tmp_path: Path) -> None:
    """Draft lengths that are fixed, and those that are chosen, from history and from a drafter."""
    out = tmp_path / "bench"
    command = [
        *(sys.executable, "-m", "pipelines.cli", "bench", "--model", "tiny:llama", "--drafter", str(drafter_folder)),
        *("--methods", *FIXED, "adaptive", "adaptive-suffix"),
        *("--k", "1", "2", "--batch", "1", "3"),
        *("--tokens", str(TOKENS), "--rounds", str(ROUNDS), "--groups", str(GROUPS)),
        *("--dtype", "float32", "--same-prompts", "--out", str(out)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr
    assert f"round {ROUNDS}/{ROUNDS}: about 0s left" in run.stdout
    assert (out / "bench.md").read_text() in run.stdout

    report = json.loads((out / "bench.json").read_text())
    arms = ["no speculation", *(f"{method} k={k}" for method in FIXED for k in (1, 2))]
    arms += ["adaptive k<=2", "adaptive-suffix k<=2"]
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
    for arm in arms[1:-2]:  # a length that is chosen may be 0
        assert sum(turn["num_drafts"] for turn in report["turns"] if turn["arm"] == arm) > 0
    assert any(note.startswith("adaptive-suffix, at the end: ") for note in report["notes"])
    assert report["packages"]["torch"] and report["machine"]["cores"] >= 1
