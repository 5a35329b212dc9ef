"""Runs of the smoke configuration in which generation is ahead of learning, and what must hold of each."""

import json
from pathlib import Path
from typing import Any

from tests.engine.runs import metrics_of

P, STEPS = 4, 8
AHEAD = ["configs/smoke.toml", "rollout.synchronous_batches=false", f"steps={STEPS}", "checkpoint.every=2"]


def events_of(root: Path, name: str) -> list[dict[str, Any]]:
    file = root / name / "stream.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check_stream(root: Path, name: str, lag: int, steps: int = STEPS) -> None:
    rows, events = metrics_of(root, name), events_of(root, name)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["stream/lag_max"] for row in rows) == lag
    assert [row["group"] for row in events if row["event"] == "taken"] == list(range(P * steps))
    for row in rows:
        tokens = sum(value for metric, value in row.items() if metric.startswith("stream/lag_tokens_"))
        assert tokens == row["rollout/generated_tokens"]
        assert row["policy/rollout_log_prob_gap"] < 0.05 or row["stream/lag_max"]
        assert row.get("policy/rollout_log_prob_gap_lag_0", 0.0) < 0.001
        assert all(0 <= value <= 1 for metric, value in row.items() if metric.startswith("idle/"))
