"""Shared files between controller and scheduler, and the planning of single engine steps."""

import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.rollout.speculation.draft_length_table import DraftLengths, DraftLengthTable, StepLog
from cotrain.rollout.speculation.step_planner import StepPlanner
from cotrain.rollout.vllm.planned_scheduling import PlannedSteps

K, MAX_BATCH = 3, 4
LENGTHS = DraftLengths((0, 2, 1, 0, 0), (-1, 0, 0, 1, -1), (0.0, 0.04, 0.04, 0.08, 0.0), 0.02, 4)


def planner_of(folder: Path, lengths: DraftLengths, max_batch: int = MAX_BATCH) -> tuple[StepPlanner, StepLog]:
    DraftLengthTable(folder / "table", lengths)
    log = StepLog(folder / "log", K, create_entries=10_000)
    return StepPlanner(DraftLengthTable(folder / "table"), StepLog(folder / "log", K), max_batch, K), log


def decode(planner: StepPlanner, batch: int, steps: int, now: float, seconds: float = 0.01) -> tuple[list[int], float]:
    """Draft lengths of these steps, each of which verifies what the one before has drafted."""
    lengths = []
    for _ in range(steps):
        lengths.append(planner.draft_lengths(now)[batch])
        before = lengths[-2] if len(lengths) > 1 else 0
        planner.scheduled(batch, lengths[-1], [before] * batch, prefill=False)
        planner.verified([(before, 0)] * batch if before else [], batch)
        now += seconds
    return lengths, now


def test_table_goes_from_one_mapping_to_another(tmp_path: Path) -> None:
    writer = DraftLengthTable(tmp_path / "table", DraftLengths.constant(K, MAX_BATCH))
    reader = DraftLengthTable(tmp_path / "table")
    assert reader.read() == DraftLengths.constant(K, MAX_BATCH)
    writer.write(LENGTHS)
    assert replace(reader.read(), trial_seconds=LENGTHS.trial_seconds) == LENGTHS
    assert reader.read().trial_seconds == pytest.approx(LENGTHS.trial_seconds)
    assert reader.read() is reader.read()
    with pytest.raises(ValueError, match="a table for 5 batch sizes"):
        writer.write(DraftLengths.constant(1, 5))


def test_a_half_written_table_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "table"
    writer, reader = DraftLengthTable(path, DraftLengths.constant(K, MAX_BATCH)), DraftLengthTable(path)
    assert reader.read().draft_tokens[1] == K
    with open(path, "r+b") as file:
        file.seek(28)
        file.write(b"\x00\x00")
        file.seek(0)
        file.write(struct.pack("<I", 7))
    assert reader.read().draft_tokens[1] == K, "a generation whose checksum does not match"
    writer.write(LENGTHS)
    assert reader.read().draft_tokens == LENGTHS.draft_tokens


def test_a_table_never_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(bytes(28 + 6 * 5))
    with pytest.raises(RuntimeError, match="never written"):
        DraftLengthTable(tmp_path / "table").read()


def test_log_keeps_order_and_counts_what_is_lost(tmp_path: Path) -> None:
    owner = StepLog(tmp_path / "log", K, create_entries=8)
    scheduler = StepLog(tmp_path / "log", K)

    def append(batch: int) -> None:
        scheduler.append((batch, 2, True, False, False, 0.5, batch, (batch, 1, 0), (1, 0, 0)))

    for batch in range(5):
        append(batch)
    taken = owner.take()
    assert taken["batch"].tolist() == [0, 1, 2, 3, 4] and taken[4]["trials"].tolist() == [4, 1, 0]
    assert (owner.take().size, owner.lost) == (0, 0)
    for batch in range(20):
        append(batch)
    assert owner.take()["batch"].tolist() == [13, 14, 15, 16, 17, 18, 19], "the eighth might be half overwritten"
    assert owner.lost == 13


def test_draft_length_follows_the_batch_and_a_new_table(tmp_path: Path) -> None:
    planner, _ = planner_of(tmp_path, replace(LENGTHS, trial_share=0.0), max_batch=6)
    assert planner.draft_lengths(0.0) == [0, 2, 1, 0, 0, 0, 0], "beyond the table its last entry goes on"
    DraftLengthTable(tmp_path / "table").write(DraftLengths.constant(7, MAX_BATCH))
    assert planner.draft_lengths(0.0) == [K] * 7, "never more than the engine was started for"


def test_trials_take_their_share_of_the_time(tmp_path: Path) -> None:
    planner, log = planner_of(tmp_path, LENGTHS)
    lengths, _ = decode(planner, 1, 5000, now=0.0)
    steps = log.take()
    share = steps["seconds"][steps["trial"]].sum() / steps["seconds"].sum()
    assert 0.015 < share <= 0.02 + 0.05 / 50, "one trial more or less"
    runs = "".join(map(str, lengths)).split("2")
    assert {run for run in runs if run} == {"0000"}, "trials of four steps"


def test_a_trial_keeps_its_length_whatever_is_wanted_next(tmp_path: Path) -> None:
    planner, _ = planner_of(tmp_path, LENGTHS)
    DraftLengthTable(tmp_path / "table").write(replace(LENGTHS, trials_at_once=1))
    lengths, now = decode(planner, 3, 3, now=0.0)
    assert lengths == [0, 1, 1]
    DraftLengthTable(tmp_path / "table").write(replace(LENGTHS, trials_at_once=1, trial_tokens=(-1, 2, 2, 2, 2)))
    assert decode(planner, 3, 3, now)[0] == [1, 1, 0]


def test_expensive_trials_are_rarer(tmp_path: Path) -> None:
    """A trial that takes ten times what the table expects is still paid for."""
    planner, log = planner_of(tmp_path, LENGTHS)
    now = 0.0
    for _ in range(5000):
        length = planner.draft_lengths(now)[3]
        planner.scheduled(3, length, [length] * 3, prefill=False)
        now += 0.2 if length else 0.01
    steps = log.take()
    assert 0.5 < steps["seconds"][steps["trial"]].sum() <= 0.02 * steps["seconds"].sum() + 0.81, "one ahead at most"


def test_no_trials_where_nothing_is_worth_one_and_no_savings_either(tmp_path: Path) -> None:
    planner, log = planner_of(tmp_path, LENGTHS)
    _, now = decode(planner, 4, 3000, now=0.0)
    assert not log.take()["trial"].any()
    lengths, _ = decode(planner, 1, 50, now)
    assert lengths.count(0) <= 4


def test_a_trial_at_once_where_speculation_is_off_and_only_one_on_credit(tmp_path: Path) -> None:
    planner, _ = planner_of(tmp_path, LENGTHS)
    table = DraftLengthTable(tmp_path / "table")
    table.write(replace(LENGTHS, trials_at_once=1))
    lengths, now = decode(planner, 3, 20, now=0.0)
    assert lengths[:6] == [0, 1, 1, 1, 1, 0], "the first step tells the batch size"
    table.write(replace(LENGTHS, trials_at_once=2))
    assert 1 not in decode(planner, 3, 20, now)[0], "the last one is not paid yet"


def test_no_trial_at_once_where_speculation_is_on(tmp_path: Path) -> None:
    planner, _ = planner_of(tmp_path, LENGTHS)
    DraftLengthTable(tmp_path / "table").write(replace(LENGTHS, trials_at_once=1))
    assert set(decode(planner, 1, 20, now=0.0)[0]) == {2}


class FakeScheduler:
    """vLLM's side: looks the draft length up by the number of scheduled requests, verifies what was drafted before."""

    dynamic_sd_lookup: list[int] | None = None

    def __init__(self) -> None:
        self.running = {"a": 0, "b": 0}
        self.new = ["a", "b"]

    def schedule(self, throttle: bool = False) -> Any:
        assert self.dynamic_sd_lookup is not None
        drafts = {request: [5] * n for request, n in self.running.items() if n}
        output = SimpleNamespace(
            num_scheduled_tokens={r: 12 if r in self.new else 1 + n for r, n in self.running.items()},
            scheduled_spec_decode_tokens=drafts,
            scheduled_new_reqs=self.new,
            num_spec_tokens_to_schedule=self.dynamic_sd_lookup[len(self.running)],
        )
        self.new = []
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        scheduler_output.scheduled_spec_decode_tokens.clear()
        self.running = dict.fromkeys(self.running, scheduler_output.num_spec_tokens_to_schedule)
        return "outputs"

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)


class PlannedScheduler(PlannedSteps, FakeScheduler):
    pass


def test_scheduler_takes_its_lengths_from_the_planner_and_reports(tmp_path: Path) -> None:
    planner, log = planner_of(tmp_path, replace(LENGTHS, trial_share=0.0))
    scheduler = PlannedScheduler()
    scheduler.planner = planner

    def step(tokens: dict[str, list[int]]) -> None:
        output = scheduler.schedule(False)
        sampled = SimpleNamespace(req_id_to_index={r: i for i, r in enumerate(tokens)})
        sampled.sampled_token_ids = list(tokens.values())
        assert scheduler.update_from_output(output, sampled) == "outputs"

    step({"a": [1], "b": [1]})
    step({"a": [1, 2], "b": [1]})
    scheduler.running.pop("b")
    step({"a": [1]})
    scheduler.running.clear()
    step({})
    steps = log.take()
    assert steps["batch"].tolist() == [2, 2, 1]
    assert steps["draft_tokens"].tolist() == [1, 1, 2]
    assert steps["prefill"].tolist() == [True, False, False]
    assert steps["steady"].tolist() == [False, True, False], "the last verifies one draft token and drafts two"
    assert steps["tokens"].tolist() == [2, 3, 1]
    assert steps["trials"].tolist() == [[0, 0, 0], [2, 0, 0], [1, 0, 0]]
    assert steps["accepted"].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert (steps["seconds"] > 0).all() and np.isfinite(steps["seconds"]).all()


def test_scheduler_without_a_planner_is_vllms_own() -> None:
    scheduler = PlannedScheduler()
    scheduler.dynamic_sd_lookup = [K] * 3
    assert scheduler.schedule().num_spec_tokens_to_schedule == K
