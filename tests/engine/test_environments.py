"""A run whose trajectories have several turns, and tools that break, with a real engine."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.runs import metrics_of, train
from tests.faults.runs import resume, start, wait_for_step, wait_until

pytestmark = pytest.mark.engine

SETTINGS = (
    "configs/smoke.toml", "steps=3", "rollout.synchronous_batches=false", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=160", "rollout.stop=['7']",
    "task=none", "task.type=environment", "task.factory=tests.engine.talkative:Talkative", "task.max_turn_tokens=40", "lossless.every=1",
    "rollout.draft_sample_method=probabilistic", "rollout.temperature=1.0", "lossless.max_share=1",
)  # fmt: skip


def events(root: Path, name: str, event: str | None = None) -> list[dict]:
    rows = [json.loads(line) for line in (root / name / "stream.jsonl").read_text().splitlines()]
    return [row for row in rows if event in (None, row["event"])]


def test_turns_are_trained_on_and_the_engine_and_the_learner_agree_on_all_of_them(tmp_path: Path) -> None:
    held_out = ["task.type=environment", "task.factory=tests.engine.talkative:Talkative", "num_prompts=3", "every=2"]
    own = [f"validation.{field}" for field in held_out]
    printed = train(tmp_path, *SETTINGS, "name=turns", "rollout.speculation.adaptive=false", *own)
    assert "greedy output with and without speculation" in printed and "DIFFERS" not in printed
    rows = metrics_of(tmp_path, "turns")
    assert [row["stream/failed_trajectories"] for row in rows] == [0, 0, 0]
    assert [row.get("validation/response_length", 0) > 3 for row in rows] == [False, True, True], "three turns each"
    for row in rows:
        assert row["policy/rollout_log_prob_gap"] < 1e-4, "engine and learner read the same tokens before each"
        assert row["rollout/feature_holes"] == 0 and row["rollout/tapped_rollouts"] == 16
        assert row["rollout/acceptance_turn_3"] >= 1
    assert rows[-1]["rollout/acceptance_length"] > 1 and rows[0]["lossless/passed"] == 1
    with (tmp_path / "turns" / "samples" / "step_000001.jsonl").open() as samples:
        assert any("you said" in json.loads(line)["response"] for line in samples), (
            "people read what the tools said too"
        )


@pytest.mark.parametrize("how", [pytest.param("raise", marks=pytest.mark.long), "die"])
def test_tools_that_break_cost_their_own_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("BREAK", how)
    train(tmp_path, *SETTINGS, "name=broken", "steps=1", "task.step_timeout_s=20")
    failed = events(tmp_path, "broken", "trajectory failed")
    [row] = metrics_of(tmp_path, "broken")
    assert row["stream/failed_trajectories"] == len(failed) > 0
    reasons = {event["reason"] for event in failed}
    expected = {"raise": "RuntimeError: the tool is broken", "die": "its process has died"}[how]
    assert expected in reasons and all(reason == expected or reason.startswith("KeyError") for reason in reasons)


@pytest.mark.long
def test_trajectories_under_way_begin_again_after_a_kill_and_stay_within_the_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAK", "slow")
    lagging = ("name=broken", "steps=5", "stream.max_policy_lag=1", "checkpoint.every=1")
    process = start(tmp_path, *SETTINGS, *lagging)
    run = tmp_path / "broken"
    wait_for_step(run, 2, process)
    taken = len(events(tmp_path, "broken", "dispatched"))
    wait_until(lambda: len(events(tmp_path, "broken", "dispatched")) > taken, process, "group under way")
    process.kill()
    process.wait()
    monkeypatch.delenv("BREAK")
    resumed = resume(tmp_path)
    output, _ = resumed.communicate(timeout=420)
    assert resumed.returncode == 0, output
    rows = metrics_of(tmp_path, "broken")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["stream/lag_max"] for row in rows) == 1, "segments of all turns are counted"
    assert all(row["rollout/acceptance_turn_2"] >= 1 for row in rows)
    last = {row["group"]: row["event"] for row in events(tmp_path, "broken") if "group" in row}
    assert Counter(last.values())["released"] >= 5 * 4, "every group of every step was trained on, once"
