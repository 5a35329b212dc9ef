"""A run in which rollouts end before weights are swapped repeats its versions, however slow the drafter's training is."""

from pathlib import Path

import pytest

from tests.engine.runs import metrics_of, train
from tests.engine.stream_runs import AHEAD, P, check_stream, events_of

pytestmark = [pytest.mark.engine, pytest.mark.long]  # test_stream_runs.py has a run with lag

UPDATES, STEPS = 24, 6


def test_with_finish_versions_follow_from_the_order_of_groups_alone(tmp_path: Path) -> None:
    slow = f"drafter.updates_per_step={UPDATES}"
    finish = "stream.max_policy_lag=2", "stream.on_swap=finish", f"steps={STEPS}"
    train(tmp_path, *AHEAD, "name=finish", *finish, slow)
    check_stream(tmp_path, "finish", 2, STEPS)
    finished = {row["group"]: row["versions"] for row in events_of(tmp_path, "finish") if row["event"] == "finished"}
    assert {group: int(versions[1:].split("-")[0]) for group, versions in finished.items()} == {
        group: max(0, group // P - 2) for group in range(P * STEPS)
    }
    rows = metrics_of(tmp_path, "finish")
    assert all(row["stream/mixed_rollouts"] == 0 for row in rows)
    # Policies were swapped while a training round of the drafter was under way.
    assert any(0 < row.get("drafter/updates", 0) < UPDATES for row in rows)
