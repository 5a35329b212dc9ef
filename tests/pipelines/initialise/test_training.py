"""Offline training of a real tiny drafter: the plan, stop and resume, early stopping, the best weights."""

import asyncio
import random

import pytest
import torch

from cotrain.records import Versions
from cotrain.run.checkpoint import RunState, find_defect, latest_checkpoint, load_state
from cotrain.run.run_dir import RunDir
from cotrain.trainer.distiller import EXPECTED
from pipelines.initialise.sources import StoredRollout
from pipelines.initialise.training import RunRecord, Training, plan_updates
from tests.cotrain.trainer.conftest import weights_of

LENGTHS = [random.Random(i).randint(5, 60) for i in range(200)]


@pytest.fixture
def plan_of(run_config):
    """The plan of two epochs of rollouts with these lengths."""

    def build(lengths=LENGTHS, batch_tokens: int = 128, seed: int = 3):
        drafter = {"model": {"type": "eagle3"}, "batch_tokens": batch_tokens}
        return plan_updates(run_config(seed=seed, init={"epochs": 2}, drafter=drafter), lengths)

    return build


def test_an_epoch_visits_every_rollout_once_in_even_batches(plan_of):
    plan = plan_of()
    visited = [i for batch in plan for i in batch]
    assert sorted(visited[:200]) == sorted(visited[200:]) == list(range(200))
    assert visited[:200] != visited[200:]
    sizes = [sum(LENGTHS[i] for i in batch) for batch in plan]
    assert max(sizes) <= 128 + max(LENGTHS) and min(sizes) > 128 / 4


def test_the_order_depends_on_the_seed_alone(plan_of):
    assert plan_of() == plan_of() != plan_of(seed=4)


def test_a_rollout_longer_than_a_batch_is_trained_on_once_an_epoch(plan_of):
    assert sorted(i for batch in plan_of([300, 5, 5], batch_tokens=64) for i in batch) == [0, 0, 1, 1, 2, 2]


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
        self.sizes, self.said, self.rows = [], [], {}

    async def features(self, rollouts):
        self.sizes.append(len(rollouts))
        return [self.by_tokens[tuple(r.prompt_token_ids + r.token_ids)] for r in rollouts]


@pytest.fixture
def build(records, new_trainer, run_config):
    """A Training in a run folder of its own, and what it was given and said."""

    def new(name: str, learning_rate: float = 3e-3, max_bytes: int = 2**21, stop_after: int = 10**9):
        config = run_config(
            name=name,
            init={"epochs": 2, "holdout": 0.25},
            drafter={"model": {"type": "eagle3"}, "batch_tokens": 100},
            rollout={"features": {"max_bytes": max_bytes}},
        )
        fresh = not (config.run_root / name).exists()
        run_dir = RunDir.create(config.run_root, name) if fresh else RunDir(config.run_root, name)
        checkpoint = latest_checkpoint(run_dir)
        state = load_state(checkpoint) if checkpoint else RunState(0, Versions(0, 0), None, {}, {"model": "m"})
        recorder = Recorder(records)
        record = RunRecord(
            config=config,
            run_dir=run_dir,
            state=state,
            say=recorder.said.append,
            log=lambda update, row: recorder.rows.update({update: row}),
            stop_requested=lambda: training.progress.update >= stop_after,
        )
        trainer = new_trainer(optimizer={"learning_rate": learning_rate})
        split = [stored(r) for r in records[:36]], [stored(r) for r in records[36:]]
        trainer.choose_vocabulary([(r.token_ids[:4], r.token_ids[4:]) for r in records[:36]], 0)
        plan = plan_updates(config, [r.num_tokens for r in split[0]])
        training = Training(record, trainer, plan, split, recorder.features)
        return training, recorder

    return new


def finish(training: Training) -> bool:
    finished = asyncio.run(training.train())
    training.run.run_dir.close()
    return finished


def test_training_improves_and_reports(build, records):
    training, recorder = build("first")
    before = training.trainer.evaluate(records[36:])[EXPECTED]
    assert finish(training)
    progress = training.progress
    assert progress.update == len(training.plan) and progress.best[EXPECTED] > before + 0.05
    assert list(recorder.rows) == sorted(training.evaluate_after) and len(recorder.rows) == 4
    assert recorder.rows[progress.best_update][EXPECTED] == progress.best[EXPECTED]
    assert [row["drafter/epoch"] for row in recorder.rows.values()] == [1, 1, 2, 2]
    assert recorder.sizes == [12, 36]  # hold-out; everything fits: computed once for both epochs
    assert any(line.startswith("epoch 2/2") and "eta" in line for line in recorder.said)
    assert training.trainer.evaluate(records[36:])[EXPECTED] == pytest.approx(progress.best[EXPECTED])


def test_a_stopped_and_resumed_training_equals_one_in_one_go(build):
    straight, _ = build("straight", max_bytes=700_000)
    finish(straight)
    stop = sorted(straight.evaluate_after)[1] + 1
    first, _ = build("halves", max_bytes=700_000, stop_after=stop)
    assert not finish(first) and first.progress.update == stop
    second, _ = build("halves", max_bytes=700_000)
    assert second.progress.update == stop
    assert finish(second)
    assert second.progress == straight.progress and second.progress.best_update > stop
    one, two = weights_of(straight.trainer), weights_of(second.trainer)
    assert all(torch.equal(one[name], two[name]) for name in one)
    third, recorder = build("halves", max_bytes=700_000)  # a finished one has nothing left to do
    assert finish(third) and not recorder.sizes


def test_it_stops_when_the_hold_out_no_longer_improves(build):
    training, recorder = build("wild", learning_rate=1.0)
    before = weights_of(training.trainer)
    assert finish(training)
    assert training.progress.update == sorted(training.evaluate_after)[1] < len(training.plan)
    assert training.progress.best_update == 0
    assert any(line.startswith("stopping early") for line in recorder.said)
    assert all(torch.equal(before[name], v) for name, v in weights_of(training.trainer).items()), "the best are back"
    again, recorder = build("wild", learning_rate=1.0)
    assert finish(again) and not recorder.sizes


def test_a_small_buffer_streams_and_a_checkpoint_is_whole(build, records):
    bound = 700_000
    training, recorder = build("small", max_bytes=bound)
    assert finish(training)
    most = (bound - 12 * records[0].num_bytes) // records[0].num_bytes
    assert len(recorder.sizes) > 4 and max(recorder.sizes[1:]) <= most
    assert sum(recorder.sizes[1:]) <= 2 * 36  # at most once an epoch
    checkpoint = latest_checkpoint(training.run.run_dir)
    assert checkpoint is not None and find_defect(checkpoint) is None
    assert {path.name for path in checkpoint.iterdir()} == {"COMPLETE", "state.json", "trainer"}


def test_a_bound_below_one_update_still_trains(build):
    training, recorder = build("none", max_bytes=9999)
    assert finish(training) and recorder.sizes[1:] == [len(batch) for batch in training.plan]
