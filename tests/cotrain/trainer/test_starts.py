"""drafter.init = "auto": what training starts from."""

import pytest
import torch

from tests.cotrain.trainer.conftest import add, expected_rates, weights_of


def test_training_starts_from_the_best_of_the_drafters_that_fit(new_trainer, target, shard_of, tmp_path):
    fields = {"updates_per_step": 10, "batch_tokens": 200, "optimizer": {"learning_rate": 1e-2}}
    earlier, other = new_trainer(**fields), new_trainer(model={"type": "eagle3", "draft_vocab_size": 64})
    for updates, name in ((3, "worse"), (20, "better")):
        add(earlier, [shard_of(target.rollouts(24, 1, seed=updates, policy_version=0))])
        earlier.train(1, updates)
        earlier.save_checkpoint(tmp_path / name, earlier.publish())
    add(other, [shard_of(target.rollouts(4, 1, seed=1, policy_version=0))])
    other.save_checkpoint(tmp_path / "smaller", 0)
    folders = [str(tmp_path / name) for name in ("better", "smaller", "worse")]

    trainer, records = new_trainer(**fields), target.rollouts(12, 1, seed=5, policy_version=0)
    add(trainer, [shard_of(records)])
    lengths, others = trainer.start_with_best(folders)
    assert list(lengths) == ["", folders[0], folders[2]] and list(others) == [folders[1]]
    assert lengths[folders[0]] > lengths[folders[2]] + 0.05 > lengths[""]
    assert "draft_vocab_size is 96, the checkpoint has 64" in others[folders[1]]
    assert all(torch.equal(own, weights_of(earlier)[name]) for name, own in weights_of(trainer).items())
    assert lengths[folders[0]] == pytest.approx(1 + sum(expected_rates(trainer, records)))
    trainer.train(1, 1)
    scores, _ = trainer.take_in([shard_of(target.rollouts(24, 1, seed=6, policy_version=0))], 0, (0,), judged=0)
    assert sum(scores.candidate[-1].rates()) > sum(scores.serving[-1].rates()) + 0.05, (
        "the engines still have the new one"
    )


def test_a_start_that_is_not_better_is_not_taken(new_trainer, target, shard_of, tmp_path, monkeypatch):
    trained, untrained = new_trainer(), new_trainer(seed=1)
    records = target.rollouts(12, 1, seed=5, policy_version=0)
    for trainer in (trained, untrained):
        add(trainer, [shard_of(records)])
    trained.train(1, 20)
    before, folder = weights_of(trained), str(tmp_path / "new")
    untrained.save_checkpoint(folder, 0)
    lengths, _ = trained.start_with_best([folder])
    assert lengths[""] > lengths[folder]
    assert all(torch.equal(own, before[name]) for name, own in weights_of(trained).items())
    monkeypatch.setattr("cotrain.trainer.trainer.TRIAL_S", -1.0)
    assert trained.start_with_best([folder])[1] == dict.fromkeys(["", folder], "not tried in -1.0 s")
    assert new_trainer().start_with_best([folder]) == ({}, {}), "there is no rollout to score on"
