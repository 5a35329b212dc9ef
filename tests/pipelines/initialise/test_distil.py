"""Offline training of a real tiny drafter: stop and resume, early stopping, the best weights, the feature cache."""

import asyncio
from pathlib import Path

import pytest
import torch

from cotrain.records import FeatureShard
from cotrain.run.checkpoint import find_defect, latest_checkpoint
from cotrain.run.run_dir import RunDir
from cotrain.transport.features import write_records
from pipelines.initialise.corpus import StoredRollout
from pipelines.initialise.distil import EXPECTED, Distillation, choose_vocabulary, plan_training
from pipelines.initialise.feature_store import FeatureStore
from tests.cotrain.trainer.conftest import AUX_LAYERS, VOCAB, weights_of

BYTES_PER_TOKEN = 4 * 64 * 4 + 9


class RecordedTap:
    """Hands out features that were computed beforehand, as the engine does."""

    def __init__(self, records, folder: Path):
        self.by_tokens = {tuple(r.token_ids.tolist()): r for r in records}
        self.folder, self.calls = folder, 0

    async def tap_sequences(self, sequences):
        self.calls += 1
        path = self.folder / f"tapped_{self.calls}.safetensors"
        records = [self.by_tokens[tuple(ids)] for ids, _ in sequences]
        write_records(path, records)
        return [FeatureShard(str(path), len(records), 0, path.stat().st_size, 0)]


@pytest.fixture
def records(target):
    return target.rollouts(24, 2, seed=1, policy_version=0)


def stored(record) -> StoredRollout:
    ids = record.token_ids.tolist()
    return StoredRollout("p", 0, ids[: record.prompt_length], ids[record.prompt_length :], "length")


@pytest.fixture
def build(records, new_trainer, run_config, tmp_path):
    """A Distillation in a run folder of its own; `stop_after` updates it is asked to stop."""

    def new(name: str, stop_after: int = 10**9, cache: int = 0, learning_rate: float = 3e-3, max_bytes=2**21, **init):
        config = run_config(
            name=name,
            init={"epochs": 2, "evaluations_per_epoch": 2, "holdout": 0.25, "patience": 9, **init},
            drafter={"model": {"type": "eagle3"}, "batch_tokens": 100, "buffer": {"max_bytes": max_bytes}},
        )
        fresh = not (config.run_root / name).exists()
        run_dir = RunDir.create(config.run_root, name) if fresh else RunDir.open(config.run_root, name)
        tap = RecordedTap(records, tmp_path)
        said: list[str] = []
        store = FeatureStore(tap, run_dir.path / "features", cache, AUX_LAYERS, said.append)
        training, holdout = records[:36], records[36:]
        trainer = new_trainer(optimizer={"learning_rate": learning_rate})
        rollouts = [stored(r) for r in training]
        choose_vocabulary(trainer, VOCAB, rollouts, [stored(r) for r in holdout], keep=False)
        plan = plan_training(config, rollouts, BYTES_PER_TOKEN)
        distillation = Distillation(config, run_dir, trainer, store, rollouts, plan, {"model": "m"}, "run")
        distillation.holdout = holdout
        distillation.say = said.append
        distillation.stop_requested = lambda: distillation.progress.update >= stop_after
        distillation.resume()
        return distillation, tap, said

    return new


def finish(distillation: Distillation) -> bool:
    finished = asyncio.run(distillation.run())
    distillation.run_dir.close()
    return finished


def test_training_improves_and_reports(build):
    distillation, tap, said = build("first")
    rows = {}
    distillation.on_look = lambda update, row: rows.update({update: row})
    before = distillation.trainer.evaluate(distillation.holdout)[EXPECTED]
    assert finish(distillation)
    progress = distillation.progress
    assert progress.finished and progress.update == distillation.plan.num_updates
    assert progress.expected_length > before + 0.05
    assert list(rows) == distillation.plan.looks and len(rows) == 4
    assert rows[progress.best_update][EXPECTED] == progress.expected_length
    assert tap.calls == len(distillation.plan.segments)  # everything fits: loaded once for both epochs
    assert any(line.startswith("epoch 2/2") and "eta" in line for line in said)
    distillation.use_best()
    assert distillation.trainer.evaluate(distillation.holdout)[EXPECTED] == pytest.approx(progress.expected_length)


def test_a_stopped_and_resumed_training_equals_one_in_one_go(build):
    straight, _, _ = build("straight", max_bytes=400_000)
    finish(straight)
    stop = straight.plan.looks[1] + 1
    first, _, _ = build("halves", stop_after=stop, max_bytes=400_000)
    assert not finish(first) and first.progress.update == stop
    second, _, _ = build("halves", max_bytes=400_000)
    assert second.progress.update == stop
    assert finish(second)
    assert second.progress == straight.progress
    one, two = weights_of(straight.trainer), weights_of(second.trainer)
    assert all(torch.equal(one[name], two[name]) for name in one)
    third, tap, _ = build("halves", max_bytes=400_000)  # a finished one has nothing left to do
    assert finish(third) and tap.calls == 0


def test_it_stops_when_the_hold_out_no_longer_improves(build):
    distillation, _, said = build("wild", learning_rate=1.0, patience=1)
    assert finish(distillation)
    assert distillation.progress.update == distillation.plan.looks[0] < distillation.plan.num_updates
    assert distillation.progress.best_update == 0
    assert any(line.startswith("stopping early") for line in said)
    moved = weights_of(distillation.trainer)
    distillation.use_best()
    assert not all(torch.equal(moved[k], v) for k, v in weights_of(distillation.trainer).items())


def test_a_small_buffer_streams_and_a_checkpoint_is_whole(build):
    distillation, tap, _ = build("small", max_bytes=400_000)
    assert all(len(epoch) > 1 for epoch in distillation.plan.epochs)
    assert finish(distillation)
    assert tap.calls > len(distillation.plan.segments)
    checkpoint = latest_checkpoint(distillation.run_dir)
    assert checkpoint is not None and find_defect(checkpoint) is None
    assert {path.name for path in checkpoint.iterdir()} == {"COMPLETE", "best", "state.json", "trainer"}


def test_a_buffer_below_one_rollout_is_refused(build):
    with pytest.raises(ValueError, match=r"drafter\.buffer\.max_bytes: 9999 does not hold .* one rollout of 24 tokens"):
        build("none", max_bytes=9999)


def test_cached_features_are_not_computed_again(build):
    distillation, tap, _ = build("cached", cache=2**30, max_bytes=400_000)
    finish(distillation)
    assert tap.calls == len(distillation.plan.segments)


def load(store: FeatureStore, name: str, records) -> list:
    return asyncio.run(store.load(name, [stored(r) for r in records]))


def test_a_damaged_or_foreign_shard_is_computed_again_and_said(records, tmp_path):
    said: list[str] = []
    tap = RecordedTap(records, tmp_path)
    store = FeatureStore(tap, tmp_path / "features", 2**30, AUX_LAYERS, said.append)
    first = load(store, "a", records[:4])
    path = tmp_path / "features" / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    again = load(store, "a", records[:4])
    assert tap.calls == 2 and "a.safetensors is truncated" in said[0]
    assert all(torch.equal(x.aux_hidden, y.aux_hidden) for x, y in zip(first, again, strict=True))
    load(store, "a", records[4:8])
    assert tap.calls == 3 and "of other rollouts or layers" in said[1]
    load(store, "a", records[4:8])
    assert tap.calls == 3 and len(said) == 2


def test_the_cache_keeps_its_limit(records, tmp_path):
    one = sum(r.num_bytes for r in records[:4])
    tap = RecordedTap(records, tmp_path)
    store = FeatureStore(tap, tmp_path / "features", int(1.5 * one), AUX_LAYERS, print)
    load(store, "a", records[:4])
    load(store, "b", records[4:8])
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["a.safetensors"]
    assert not list(tmp_path.glob("tapped_*"))
