"""`cotrain bench` as a user runs it: two real engines on the tiny Llama, all kinds of arms."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

TOKENS, ROUNDS, GROUPS = 12, 2, 2


def test_bench_measures_every_arm(drafter_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench"
    command = [
        *(sys.executable, "-m", "pipelines.cli", "bench", "--model", "tiny:llama", "--drafter", str(drafter_folder)),
        *("--k", "1", "2", "--batch", "1", "3", "--tokens", str(TOKENS), "--rounds", str(ROUNDS)),
        *("--groups", str(GROUPS)),
        *("--dtype", "float32", "--breakdown", "--out", str(out)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    assert "round 2/2, batch 3" in run.stdout
    assert (out / "bench.md").read_text() in run.stdout
    assert (out / "bench.png").stat().st_size > 5000

    report = json.loads((out / "bench.json").read_text())
    arms = [("none", 0), *((method, k) for method in ("ngram", "greedy", "probabilistic") for k in (1, 2))]
    for rows in (report["arms"], report["breakdown"]):
        assert [(r["batch"], r["method"], r["draft_tokens"]) for r in rows] == [
            (b, *arm) for b in (1, 3) for arm in arms
        ]
    assert len(report["measurements"]) == 2 * len(arms) * ROUNDS
    for turn in report["measurements"]:
        assert turn["num_tokens"] == GROUPS * turn["batch"] * (TOKENS - 1)
        assert 0 < turn["decode_seconds"] < turn["seconds"]
        if turn["method"] == "none":
            assert turn["num_drafts"] == 0
        elif turn["method"] != "ngram":
            # One position may be cut from a request's last draft by the length limit.
            assert turn["num_drafts"] > 0
            assert (
                0 <= turn["num_drafts"] * turn["draft_tokens"] - turn["num_draft_tokens"] <= 2 * GROUPS * turn["batch"]
            )
    for row in report["breakdown"]:
        drafted = row["method"] in ("greedy", "probabilistic")
        assert row["verify"] > 0 and row["sample"] > 0 and row["engine"] > 0
        assert (row["draft_model"] > 0) == drafted
    assert report["packages"]["torch"] and report["machine"]["cores"] >= 1
