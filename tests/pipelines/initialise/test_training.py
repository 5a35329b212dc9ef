"""Offline training of a real tiny drafter: the plan, stop and resume, early stopping, the best weights."""

import asyncio
import random

import pytest
import torch

from cotrain.run.checkpoint import find_defect, latest_checkpoint
from cotrain.run.run_dir import RunDir
from pipelines.initialise.rollouts import StoredRollout
from pipelines.initialise.training import (
    EXPECTED,
    RunRecord,
    Training,
    choose_vocabulary,
    plan_updates,
    vocabulary_coverage,
)
from tests.cotrain.trainer.conftest import VOCAB, weights_of

BYTES_PER_TOKEN = 4 * 64 * 4 + 9
LENGTHS = [random.Random(i).randint(5, 60) for i in range(200)]


@pytest.fixture
def plan_of(run_config):
    """The plan of rollouts with these lengths, at one byte a token."""

    def build(lengths=LENGTHS, max_tokens: int = 10**6, batch_tokens: int = 128, seed: int = 3, epochs: int = 2):
        config = run_config(
            seed=seed,
            init={"epochs": epochs, "holdout": 0.5},
            drafter={"model": {"type": "eagle3"}, "batch_tokens": batch_tokens},
            rollout={"features": {"max_bytes": 2 * max_tokens}},
        )
        return plan_updates(config, lengths, 1)

    return build


def test_an_epoch_visits_every_rollout_once_within_its_bounds(plan_of):
    plan = plan_of(max_tokens=1500)
    for epoch in range(2):
        updates = [update for update in plan if update.epoch == epoch]
        assert sorted(i for update in updates for i in update.rollouts) == list(range(200))
        chunks = list(dict.fromkeys(update.chunk for update in updates))
        assert len(chunks) > 2 and all(sum(LENGTHS[i] for i in chunk) <= 1500 for chunk in chunks)
        assert all(set(update.rollouts) <= set(update.chunk) for update in updates)
        sizes = [sum(LENGTHS[i] for i in update.rollouts) for update in updates]
        assert max(sizes) <= 128 + max(LENGTHS) and min(sizes) > 128 / 4


def test_the_order_depends_on_seed_and_epoch_alone(plan_of):
    plan = plan_of()
    assert plan_of() == plan and plan_of(seed=4) != plan
    half = len(plan) // 2
    assert [update.rollouts for update in plan[:half]] != [update.rollouts for update in plan[half:]]


def test_a_rollout_longer_than_a_batch_is_trained_on_once_an_epoch(plan_of):
    plan = plan_of([300, 5, 5], batch_tokens=64)
    assert sorted(i for update in plan if update.epoch == 1 for i in update.rollouts) == [0, 1, 2]


@pytest.fixture
def records(target):
    return target.rollouts(24, 2, seed=1, policy_version=0)


def stored(record) -> StoredRollout:
    ids = record.token_ids.tolist()
    return StoredRollout("p", 0, ids[: record.prompt_length], ids[record.prompt_length :], "length")


class Recorder:
    """Hands out features that were computed beforehand, and keeps what a training says and logs."""

    def __init__(self, records):
        self.by_tokens = {tuple(r.token_ids.tolist()): r for r in records}
        self.calls, self.said, self.rows = 0, [], {}

    async def features(self, rollouts):
        self.calls += 1
        return [self.by_tokens[tuple(r.prompt_token_ids + r.token_ids)] for r in rollouts]


@pytest.fixture
def build(records, new_trainer, run_config):
    """A Training in a run folder of its own, and what it was given and said."""

    def new(name: str, learning_rate: float = 3e-3, max_bytes: int = 2**21):
        config = run_config(
            name=name,
            init={"epochs": 2, "holdout": 0.25},
            drafter={"model": {"type": "eagle3"}, "batch_tokens": 100},
            rollout={"features": {"max_bytes": max_bytes}},
        )
        fresh = not (config.run_root / name).exists()
        run_dir = RunDir.create(config.run_root, name) if fresh else RunDir(config.run_root, name)
        recorder = Recorder(records)
        record = RunRecord(
            config, run_dir, {"model": "m"}, "run", recorder.said.append, lambda u, row: recorder.rows.update({u: row})
        )
        trainer = new_trainer(optimizer={"learning_rate": learning_rate})
        rollouts = [stored(r) for r in records[:36]]
        choose_vocabulary(trainer, VOCAB, rollouts)
        plan = plan_updates(config, [r.num_tokens for r in rollouts], BYTES_PER_TOKEN)
        return Training(record, trainer, plan, rollouts, recorder.features, records[36:]), recorder

    return new


def finish(training: Training, stop_after: int = 10**9) -> bool:
    finished = asyncio.run(training.train(lambda: training.progress.update >= stop_after))
    training.run.run_dir.close()
    return finished


def test_training_improves_and_reports(build, records):
    training, recorder = build("first")
    assert 0.5 < vocabulary_coverage(training.trainer, [stored(r) for r in records[36:]]) <= 1
    before = training.trainer.evaluate(records[36:])[EXPECTED]
    assert finish(training)
    progress = training.progress
    assert progress.update == len(training.plan) and progress.best[EXPECTED] > before + 0.05
    assert list(recorder.rows) == sorted(training.evaluate_after) and len(recorder.rows) == 4
    assert recorder.rows[progress.best_update][EXPECTED] == progress.best[EXPECTED]
    assert recorder.calls == 1  # everything fits: computed once for both epochs
    assert any(line.startswith("epoch 2/2") and "eta" in line for line in recorder.said)
    training.use_best()
    assert training.trainer.evaluate(records[36:])[EXPECTED] == pytest.approx(progress.best[EXPECTED])


def test_a_stopped_and_resumed_training_equals_one_in_one_go(build):
    straight, _ = build("straight", max_bytes=400_000)
    finish(straight)
    stop = sorted(straight.evaluate_after)[1] + 1
    first, _ = build("halves", max_bytes=400_000)
    assert not finish(first, stop_after=stop) and first.progress.update == stop
    second, _ = build("halves", max_bytes=400_000)
    assert second.progress.update == stop
    assert finish(second)
    assert second.progress == straight.progress
    one, two = weights_of(straight.trainer), weights_of(second.trainer)
    assert all(torch.equal(one[name], two[name]) for name in one)
    third, recorder = build("halves", max_bytes=400_000)  # a finished one has nothing left to do
    assert finish(third) and recorder.calls == 0


def test_it_stops_when_the_hold_out_no_longer_improves(build):
    training, recorder = build("wild", learning_rate=1.0)
    assert finish(training)
    assert training.progress.update == sorted(training.evaluate_after)[1] < len(training.plan)
    assert training.progress.best_update == 0
    assert any(line.startswith("stopping early") for line in recorder.said)
    moved = weights_of(training.trainer)
    training.use_best()
    assert not all(torch.equal(moved[k], v) for k, v in weights_of(training.trainer).items())
    again, recorder = build("wild", learning_rate=1.0)
    assert finish(again) and recorder.calls == 0


def test_a_small_buffer_streams_and_a_checkpoint_is_whole(build):
    training, recorder = build("small", max_bytes=400_000)
    assert len({update.chunk for update in training.plan}) > 1
    assert finish(training)
    assert recorder.calls > len({update.chunk for update in training.plan})
    checkpoint = latest_checkpoint(training.run.run_dir)
    assert checkpoint is not None and find_defect(checkpoint) is None
    assert {path.name for path in checkpoint.iterdir()} == {"COMPLETE", "best", "state.json", "trainer"}


def test_a_buffer_below_one_rollout_is_refused(build):
    with pytest.raises(
        ValueError, match=r"rollout\.features\.max_bytes: 9999 does not hold .* one rollout of 24 tokens"
    ):
        build("none", max_bytes=9999)
