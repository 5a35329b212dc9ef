"""Training of a real tiny drafter on recorded rollouts: windows, stop and resume, the best weights."""

import asyncio
import io
from dataclasses import replace

import pytest
import torch

from cotrain.config.schema import RolloutConfig
from cotrain.records import Versions
from cotrain.run.checkpoint import RunState, find_defect, latest_checkpoint, load_state
from cotrain.run.console import Console
from cotrain.run.run_dir import RunDir
from cotrain.trainer.distiller import EXPECTED
from pipelines.initialise.sources import StoredRollout
from pipelines.initialise.training import RunRecord, Training, updates_of, windows_of
from tests.cotrain.trainer.conftest import weights_of


def test_windows_keep_the_order_and_the_bound() -> None:
    rollouts = [StoredRollout("p", 0, [1] * 4, [2] * length) for length in (6, 6, 30, 1, 5, 5)]
    windows = windows_of(rollouts, tokens=20)
    assert [rollout for window in windows for rollout in window] == rollouts
    assert [[rollout.num_tokens for rollout in window] for window in windows] == [[10, 10], [34], [5, 9], [9]]
    assert windows_of(rollouts, tokens=0) == [[rollout] for rollout in rollouts]
    assert windows_of(rollouts, tokens=1000) == [rollouts]
    assert [updates_of(window, batch_tokens=16) for window in windows] == [2, 3, 1, 1]


@pytest.fixture
def records(target):
    return target.rollouts(24, 2, seed=1, policy_version=0)


def stored(record) -> StoredRollout:
    ids = record.token_ids.tolist()
    return StoredRollout("p", 0, ids[: record.prompt_length], ids[record.prompt_length :])


class Recorder:
    """Hands out features that were computed beforehand, and keeps what a training says and logs."""

    def __init__(self, records):
        self.by_tokens = {tuple(r.token_ids.tolist()): r for r in records}
        self.sizes, self.printed, self.rows = [], io.StringIO(), {}

    async def features(self, rollouts):
        self.sizes.append(len(rollouts))
        return [replace(self.by_tokens[tuple(r.prompt_token_ids + r.token_ids)]) for r in rollouts]


@pytest.fixture
def build(records, new_trainer, run_config):
    """A Training in a run folder of its own, and what it was given and said."""

    def new(name: str, learning_rate: float = 3e-3, max_bytes: int = 2**21, stop_after: int = 10**9):
        config = run_config(
            name=name,
            init={"epochs": 2, "holdout": 0.25},
            drafter={"model": {"type": "eagle3"}, "batch_tokens": 100, "updates_per_step": 3},
            rollout={"features": {"max_bytes": max_bytes}},
        )
        fresh = not (config.run_root / name).exists()
        run_dir = RunDir.create(config.run_root, name) if fresh else RunDir(config.run_root, name)
        checkpoint = latest_checkpoint(run_dir)
        state = load_state(checkpoint) if checkpoint else RunState(0, Versions(0, 0), {}, {"model": "m"})
        recorder = Recorder(records)
        record = RunRecord(
            config=config,
            run_dir=run_dir,
            state=state,
            console=Console(recorder.printed),
            log=lambda step, row: recorder.rows.update({step: row}),
            stop_requested=lambda: training.step >= stop_after,
        )
        split = [stored(r) for r in records[:36]], [stored(r) for r in records[36:]]
        limits = {"max_prompt_tokens": 32, "max_new_tokens": 32, "features": {"max_bytes": max_bytes}}
        rollout = RolloutConfig(num_speculative_tokens=3, dtype="float32", **limits)
        trainer = new_trainer(rollout=rollout, optimizer={"learning_rate": learning_rate})
        training = Training(record, trainer, split, recorder.features)
        return training, recorder

    return new


def finish(training: Training) -> bool:
    finished = asyncio.run(training.train()) is not None
    training.run.run_dir.close()
    return finished


def test_training_improves_and_reports(build, records):
    training, recorder = build("first")
    assert finish(training)
    progress, printed = training.progress, recorder.printed.getvalue()
    assert training.step == list(recorder.rows)[-1] == len(recorder.rows) == 2 * 3  # 36 x 24 tokens, 9 updates an epoch
    lengths = {step: row[EXPECTED] for step, row in recorder.rows.items() if EXPECTED in row}
    assert list(lengths) == [3, 6] and progress.best[EXPECTED] == max(lengths.values()) > 1.05
    before = float(printed.partition("before training: expected acceptance length ")[2].split()[0])
    assert progress.best[EXPECTED] > before + 0.05 and progress.best_epoch in (1, 2)
    assert recorder.sizes == [12, 36]  # hold-out; everything fits: computed once for both epochs
    assert "step 6/6" in printed and "epoch 2/2  loss " in printed
    assert training.trainer.evaluate(records[36:])[EXPECTED] == pytest.approx(progress.best[EXPECTED])


def test_a_stopped_and_resumed_training_equals_one_in_one_go(build):
    straight, _ = build("straight")
    finish(straight)
    first, _ = build("halves", stop_after=4)
    assert not finish(first) and first.progress.epoch == 1
    second, _ = build("halves")
    assert second.step == 3
    assert finish(second)
    assert second.progress == straight.progress
    one, two = weights_of(straight.trainer), weights_of(second.trainer)
    assert all(torch.equal(one[name], two[name]) for name in one)
    third, recorder = build("halves")  # a finished one has nothing left to do
    assert finish(third) and not recorder.sizes


def test_a_training_that_makes_it_worse_keeps_the_first_weights(build):
    training, _ = build("wild", learning_rate=1.0)
    assert finish(training)
    assert (training.progress.epoch, training.progress.best_epoch) == (2, 0)
    printed = weights_of(training.trainer)
    again, recorder = build("wild", learning_rate=1.0)
    assert finish(again) and not recorder.sizes
    assert all(torch.equal(printed[name], v) for name, v in weights_of(again.trainer).items()), "the best are back"


def test_a_small_memory_streams_and_a_checkpoint_is_whole(build, records):
    bound = 700_000
    training, recorder = build("small", max_bytes=bound)
    assert finish(training)
    most = (bound - 12 * records[0].num_bytes) // records[0].num_bytes
    assert len(recorder.sizes) > 4 and max(recorder.sizes[1:]) <= most
    assert sum(recorder.sizes[1:]) == 2 * 36  # once an epoch
    checkpoint = latest_checkpoint(training.run.run_dir)
    assert checkpoint is not None and find_defect(checkpoint) is None
    assert {path.name for path in checkpoint.iterdir()} == {"COMPLETE", "state.json", "trainer"}


def test_a_bound_below_one_rollout_still_trains(build):
    training, recorder = build("none", max_bytes=200_000)  # the hold-out alone takes more
    assert finish(training) and recorder.sizes[1:] == [1] * 2 * 36
