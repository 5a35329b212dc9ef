import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cotrain.config.schema import RolloutConfig
from cotrain.publish.evidence import enough
from cotrain.trainer.buffer import teacher_of
from drafters.losses import drafter_loss
from tests.cotrain.trainer.conftest import SAMPLING, VOCAB, add, expected_rates, make_record, payload_of, weights_of


def run_steps(trainer, target, shard_of, steps, num_updates=3):
    """Rollouts, features, training and a new policy version for each step, as the controller does it."""
    rows = []
    for step in steps:
        records = target.rollouts(num_prompts=4, samples=2, seed=step, policy_version=step - 1)
        row = add(trainer, [shard_of(records)]) | trainer.train(step, num_updates)
        trainer.set_target_weights(payload_of(target), step)
        rows.append(without_times(row))
    return rows


def without_times(row):
    """Metrics that two equal runs share."""
    return {
        name: value
        for name, value in row.items()
        if name not in ("drafter/tokens_per_s", "drafter/train_s", "drafter/score_s", "drafter/score_cpu_s")
    }


def rates_of(trainer, records):
    """Expected acceptance rates of the current weights, by draft position."""
    return trainer.score([trainer.drafter], records)[0][-1].rates()


def test_loss_falls_and_expected_acceptance_rises(new_trainer, target, shard_of):
    trainer = new_trainer(updates_per_step=10, batch_tokens=200, optimizer={"learning_rate": 1e-2})
    records = target.rollouts(48, 1, seed=1, policy_version=0)
    add(trainer, [shard_of(records[12:])])
    before = sum(expected_rates(trainer, records[:12]))
    rows = [trainer.train(step, 10) for step in (1, 2, 3)]
    assert rows[2]["drafter/loss"] < 0.75 * rows[0]["drafter/loss"]
    assert rows[2]["drafter/loss_pos_3"] < 0.75 * rows[0]["drafter/loss_pos_3"]
    assert sum(expected_rates(trainer, records[:12])) > before + 0.08


def test_metrics_of_a_step(new_trainer, target, shard_of):
    trainer = new_trainer()
    add(trainer, [shard_of(target.rollouts(3, 2, seed=1, policy_version=0))])
    trainer.set_target_weights(payload_of(target), 1)
    add(trainer, [shard_of(target.rollouts(3, 2, seed=2, policy_version=1))])
    row = trainer.train(2, 3)
    assert row["drafter/buffer_tokens"] == 2 * 6 * 24
    assert row["drafter/buffer_bytes"] == 12 * 24 * (8 + 4 * 4 * 64 + 1)
    assert row["drafter/lag_versions"] == pytest.approx(1 / 3)  # new, old, then a new epoch
    assert row["drafter/learning_rate"] == 3e-3
    assert row["drafter/tokens_per_s"] > 0
    assert row["drafter/grad_norm"] > 0
    per_position = [row[f"drafter/loss_pos_{k}"] for k in (1, 2, 3)]
    assert 0 < row["drafter/loss"] < max(per_position), "positions that are reached are easier"


def test_evaluation_is_of_the_served_positions_and_not_of_how_rollouts_are_batched(new_trainer, target):
    records = target.rollouts(4, 2, seed=1, policy_version=0)
    found = []
    for batch_tokens in (30, 10_000):
        trainer = new_trainer(batch_tokens=batch_tokens, rollout=RolloutConfig(num_speculative_tokens=2))
        rates = expected_rates(trainer, records)
        assert 1 > rates[0] > rates[1] > 0 and len(rates) == 2
        found.append(sum(rates))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert expected_rates(trainer, []) == []


def test_saved_and_loaded_trainer_continues_bit_for_bit(new_trainer, target, shard_of, tmp_path):
    schedule = {"learning_rate": 3e-3, "warmup_steps": 2, "schedule": "cosine"}
    fields = {"optimizer": schedule, "updates_per_step": 1}
    steps = partial(run_steps, num_updates=1)  # saved in the middle of an epoch of the buffer
    straight = new_trainer(**fields)
    rows = steps(straight, target, shard_of, [1, 2])
    rows += [without_times(straight.train(2, 1))]  # on the features of the step before
    rows += steps(straight, target, shard_of, [3])

    first = new_trainer(**fields)
    rows_in_two = steps(first, target, shard_of, [1, 2])
    first.publish()
    first.save(tmp_path / "saved")
    second = new_trainer(**fields)
    second.load(tmp_path / "saved")
    second.set_target_weights(payload_of(target), 2)  # of the policy's own version, as a run does when it starts
    rows_in_two += [without_times(second.train(2, 1))]
    rows_in_two += steps(second, target, shard_of, [3])

    assert rows_in_two == rows
    assert second.drafter_version == 1
    expected, found = weights_of(straight), weights_of(second)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_global_random_state_is_neither_read_nor_moved(new_trainer, target, shard_of):
    rows = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        rows.append(run_steps(new_trainer(), target, shard_of, [1]))
        assert torch.equal(torch.get_rng_state(), before)
    assert rows[0] == rows[1]


def test_training_does_not_change_the_target(new_trainer, target, shard_of):
    trainer = new_trainer()
    before = load_file(payload_of(target))
    run_steps(trainer, target, shard_of, [1, 2])
    held = trainer.target_weights[1]
    assert torch.equal(held.head, before["lm_head.weight"])
    assert torch.equal(held.embedding, before["model.embed_tokens.weight"])


def test_feature_files_are_deleted_and_a_broken_one_keeps_all(new_trainer, target, shard_of):
    trainer = new_trainer()
    records = [target.rollouts(2, 2, seed=i, policy_version=0) for i in range(2)]
    good, broken = (shard_of(part, name=f"shard_{i}") for i, part in enumerate(records))
    whole = Path(broken).read_bytes()
    Path(broken).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"shard_1\.safetensors cannot be read"):
        add(trainer, [good, broken])
    assert [Path(shard).exists() for shard in (good, broken)] == [True, True] and not trainer._buffer.records
    Path(broken).write_bytes(whole)
    add(trainer, [good, broken])
    assert [Path(shard).exists() for shard in (good, broken)] == [False, False]
    assert trainer._buffer.metrics()["drafter/buffer_tokens"] == sum(
        record.num_tokens for part in records for record in part
    )


def test_a_candidate_that_no_engine_would_serve_is_resumed_for_the_gate_to_refuse(new_trainer, tmp_path):
    trainer = new_trainer()
    with torch.no_grad():
        next(trainer.drafter.parameters()).flatten()[0] = torch.nan
    trainer.save(tmp_path / "saved")
    resumed = new_trainer()
    resumed.load(tmp_path / "saved")
    assert next(resumed.drafter.parameters()).isnan().any()


def test_nan_feature_is_named_and_not_trained_on(new_trainer, target, shard_of):
    trainer = new_trainer()
    records = target.rollouts(2, 2, seed=0, policy_version=0)
    final_hidden = records[2].final_hidden.clone()
    final_hidden[5, 1] = torch.nan
    records[2] = replace(records[2], final_hidden=final_hidden)
    with pytest.raises(ValueError, match="final_hidden of rollout 2 is not finite at position 5"):
        add(trainer, [shard_of(records)])
    assert not trainer._buffer.records


def test_features_without_a_head_of_their_version_are_refused(new_trainer, target, shard_of):
    trainer = new_trainer()
    with pytest.raises(ValueError, match=r"has policy version 3, the trainer knows \[0\]"):
        add(trainer, [shard_of(target.rollouts(2, 2, seed=0, policy_version=3))])


def test_features_of_other_layers_are_refused(new_trainer, shard_of):
    with pytest.raises(ValueError, match=r"aux layers \(1, 3, 4\), the trainer knows \[\(2, 4, 5\)\]"):
        add(new_trainer(), [shard_of([replace(make_record(), aux_layers=(1, 3, 4))])])


def test_each_batch_is_taught_by_its_own_sampling(new_trainer, target, shard_of, monkeypatch):
    """Rollouts of several samplers are scored and trained on beside each other, those of greedy requests among them."""
    trainer, records = new_trainer(), target.rollouts(4, 2, seed=1, policy_version=0)
    samplings = [replace(SAMPLING, temperature=t) for t in (0.0, 0.7)]
    mixed = [replace(record, sampling=samplings[i % 2]) for i, record in enumerate(records)]
    of_tokens = {tuple(record.token_ids.tolist()): record.sampling for record in mixed}
    seen = []

    def loss(drafter, rows, weights, sampling, *rest):
        for document in range(int(rows.document_ids[-1]) + 1):
            assert of_tokens[tuple(rows.token_ids[rows.document_ids == document].tolist())] == sampling
        seen.append(sampling)
        return drafter_loss(drafter, rows, weights, sampling, *rest)

    monkeypatch.setattr("cotrain.trainer.trainer.drafter_loss", loss)
    scores, _ = trainer.take_in([shard_of(mixed[i::2], name=f"shard_{i}") for i in range(2)], 0, [0])
    assert math.isfinite(lengths_of(scores)[0])
    metrics = trainer.train(1, 4)
    assert set(seen) == set(samplings) and metrics["drafter/loss"] > 0
    alone = [sum(expected_rates(trainer, mixed[i::2])) for i in range(2)]
    together = sum(expected_rates(trainer, sorted(mixed, key=teacher_of)))
    assert min(alone) < together < max(alone)


def test_heads_are_kept_as_long_as_features_need_them(new_trainer, target, shard_of):
    trainer = new_trainer()
    run_steps(trainer, target, shard_of, [1, 2, 3])
    # Buffer: versions 1 and 2 (max_age 1); 3 is served next; 0 has left.
    assert sorted(trainer.target_weights) == [1, 2, 3]


def test_a_checkpoint_holds_one_head_once_earlier_versions_are_dropped(new_trainer, target, shard_of, tmp_path):
    trainer = new_trainer(updates_per_step=1)
    run_steps(trainer, target, shard_of, [1, 2], num_updates=1)

    def saved_heads(name):
        trainer.save(tmp_path / name)
        resumed = new_trainer()
        resumed.load(tmp_path / name)
        return sorted(resumed.target_weights), resumed

    assert saved_heads("between")[0] == [0, 1], (
        "those that the buffer needs; the policy's checkpoint has that of version 2"
    )
    trainer.drop_earlier_versions()
    heads, resumed = saved_heads("due")
    assert heads == [1] and {record.policy_version for record in resumed._buffer.records} == {1}
    sizes = [(tmp_path / name / "trainer.pt").stat().st_size for name in ("between", "due")]
    assert sizes[0] - sizes[1] > 2 * VOCAB * 64 * 4, "embedding and head of version 0"
    for one in (trainer, resumed):
        one.set_target_weights(payload_of(target), 2)
    rows = [run_steps(one, target, shard_of, [3], num_updates=2) for one in (trainer, resumed)]
    assert rows[0] == rows[1] and rows[0][0]["drafter/buffer_dropped_for_checkpoints"] == 8


def test_each_batch_is_taught_by_the_head_of_its_own_version(new_trainer, target, shard_of, tmp_path, monkeypatch):
    trainer = new_trainer(updates_per_step=4)
    add(trainer, [shard_of(target.rollouts(4, 2, seed=1, policy_version=0))])
    other = {name: tensor + 1 for name, tensor in load_file(payload_of(target)).items()}
    save_file(other, tmp_path / "policy.safetensors")
    trainer.set_target_weights(str(tmp_path / "policy.safetensors"), 1)
    add(trainer, [shard_of(target.rollouts(4, 2, seed=2, policy_version=1))])
    heads = {0: target.model.lm_head.weight, 1: other["lm_head.weight"]}
    seen = []

    def loss(drafter, batch, weights, *rest):
        assert batch.policy_version == weights.policy_version
        assert torch.equal(weights.head, heads[batch.policy_version])
        seen.append(batch.policy_version)
        return drafter_loss(drafter, batch, weights, *rest)

    monkeypatch.setattr("cotrain.trainer.trainer.drafter_loss", loss)
    trainer.train(2, 4)
    assert set(seen) == {0, 1}


def test_tied_target_and_broken_payloads(new_trainer, target, tmp_path):
    trainer = new_trainer()
    embedding = torch.randn(VOCAB, 64)
    path = tmp_path / "policy.safetensors"
    save_file({"model.embed_tokens.weight": embedding}, path)
    trainer.set_target_weights(str(path), 4)
    path.write_bytes(bytes(path.stat().st_size))  # the next payload comes under the same name
    assert torch.equal(trainer.target_weights[4].head, embedding)
    for tensors, message in [
        ({"model.norm.weight": torch.ones(64)}, "expected one embedding"),
        ({"model.embed_tokens.weight": torch.ones(VOCAB + 1, 64)}, r"is \(129, 64\), the target's is \(128, 64\)"),
    ]:
        save_file(tensors, path)
        with pytest.raises(ValueError, match=message):
            trainer.set_target_weights(str(path), 5)
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="cannot be read"):
        trainer.set_target_weights(str(path), 5)


def test_vocabulary_is_chosen_once_from_the_first_features(new_trainer, target, shard_of):
    trainer = new_trainer(model={"type": "eagle3", "draft_vocab_size": 8, "aux_layers": (2, 4, 5)})
    record = replace(make_record(prompt=100, response_length=9), token_ids=torch.tensor([100] * 4 + [90, 91, 92] * 3))
    metrics = add(trainer, [shard_of([record])])
    # 3 tokens counted 3 times in the response, one counted 4 x 0.1 times in the prompt, eos, the lowest ids.
    assert trainer.drafter.draft_to_target.tolist() == [0, 1, 2, 3, 90, 91, 92, 100]
    assert metrics["drafter/vocabulary_coverage"] == 1.0
    assert torch.equal(trainer.drafter.lm_head.weight, target.model.lm_head.weight[trainer.drafter.draft_to_target])
    again = add(trainer, [shard_of([make_record(prompt=5)])])
    assert "drafter/vocabulary_coverage" not in again
    assert 90 in trainer.drafter.draft_to_target


def test_response_tokens_weigh_more_than_prompt_tokens(new_trainer, shard_of):
    trainer = new_trainer(model={"type": "eagle3", "draft_vocab_size": 4, "aux_layers": (2, 4, 5)})
    tokens = torch.tensor([100] * 4 + [90, 91, 92])
    record = replace(make_record(response_length=3), token_ids=tokens)
    metrics = add(trainer, [shard_of([record])])
    assert trainer.drafter.draft_to_target.tolist() == [2, 90, 91, 92]
    assert metrics["drafter/vocabulary_coverage"] == pytest.approx(3 / 3.4)


def test_loaded_drafter_keeps_its_vocabulary_and_weights(new_trainer, target, shard_of, tmp_path):
    trained = new_trainer()
    run_steps(trained, target, shard_of, [1])
    trained.drafter.save(tmp_path / "drafter", torch.float32)
    trainer = new_trainer(init_folder=str(tmp_path / "drafter"))
    metrics = add(trainer, [shard_of(target.rollouts(4, 2, seed=9, policy_version=0))])
    assert "drafter/vocabulary_coverage" not in metrics
    expected, found = weights_of(trained), weights_of(trainer)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_loaded_drafter_of_another_shape_is_refused(new_trainer, tmp_path):
    new_trainer().drafter.save(tmp_path / "drafter", torch.float32)
    model = {"type": "eagle3", "draft_vocab_size": 64, "aux_layers": (2, 4, 5), "trained_depth": 4}
    message = "draft_vocab_size is 64, the checkpoint has 96; drafter.model.trained_depth is 4, the checkpoint has 3"
    with pytest.raises(ValueError, match=message):
        new_trainer(init_folder=str(tmp_path / "drafter"), model=model)


def test_non_finite_loss_stops_before_the_optimizer_moves(new_trainer, target, shard_of, tmp_path):
    trainer = new_trainer()
    broken = load_file(payload_of(target))
    broken["lm_head.weight"][3] = torch.nan
    save_file(broken, tmp_path / "policy.safetensors")
    run_steps(trainer, target, shard_of, [1])
    trainer.set_target_weights(str(tmp_path / "policy.safetensors"), 1)
    add(trainer, [shard_of(target.rollouts(4, 2, seed=2, policy_version=1))])
    before = weights_of(trainer)
    with pytest.raises(FloatingPointError, match=r"step 2: loss nan.* target's head of policy version 1 is not finite"):
        trainer.train(2, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trainer).items())


def test_broken_drafter_is_neither_trained_nor_published(new_trainer, target, shard_of):
    trainer = new_trainer()
    run_steps(trainer, target, shard_of, [1])
    with torch.no_grad():
        trainer.drafter.norm.weight[0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"step 2: .*norm\.weight is not finite"):
        trainer.train(2, 3)
    with pytest.raises(FloatingPointError, match="drafter version 1 is not published"):
        trainer.publish()
    assert trainer.drafter_version == 0


def test_nothing_to_train_on_is_an_error(new_trainer):
    with pytest.raises(ValueError, match="step 1: no features to train the drafter on"):
        new_trainer().train(1, 3)


def test_each_publication_is_the_next_version(new_trainer):
    trainer = new_trainer()
    assert [trainer.drafter_version, trainer.publish(), trainer.publish(), trainer.drafter_version] == [0, 1, 2, 2]


def lengths_of(scores):
    """(serving, candidate) acceptance lengths over all rollouts."""
    drafters = (by_length[-1] for by_length in (scores.serving, scores.candidate) if by_length)
    return [None if d is None else 1 + float(d.accepted.sum() / d.steps.sum()) for d in drafters]


def test_fresh_rollouts_score_the_served_drafter_and_the_candidate(new_trainer, target, shard_of):
    trainer = new_trainer(updates_per_step=30, batch_tokens=200, optimizer={"learning_rate": 1e-2})
    first, _ = trainer.take_in([shard_of(target.rollouts(48, 1, seed=1, policy_version=0))], 0, [0])
    assert first.candidate is None
    assert len(set(first.prompts)) == len(first.prompts) == len(first.serving[-1].steps) == 32, "MAX_ROLLOUTS"
    trainer.train(1, 30)
    fresh = target.rollouts(12, 2, seed=2, policy_version=0)
    scores, _ = trainer.take_in([shard_of(fresh)], 0, [0])
    serving, candidate = lengths_of(scores)
    assert (scores.updates, [s.accepted.shape for s in scores.candidate]) == (30, [(24, 1), (24, 2), (24, 3)])
    assert candidate > serving + 0.04
    assert trainer.take_in(fresh, 0, [0], judged=30)[0].candidate is None, "it was judged before"
    assert trainer.publish() == 1
    again, _ = trainer.take_in(fresh, 1, [0])
    assert again.candidate is None, "it is the published drafter itself"
    assert lengths_of(again)[0] == pytest.approx(candidate)


def test_a_rollout_in_which_nothing_could_be_drafted_or_with_a_hole_is_trained_on_but_not_scored(new_trainer, shard_of):
    hole = torch.ones(13, dtype=torch.bool)
    hole[[7, -1]] = False
    records = [make_record(prompt=p, response_length=9) for p in range(4)]
    odd = [make_record(prompt=9, response_length=1), replace(records[3], feature_mask=hole)]
    odd.append(replace(records[2], earlier_tokens=8))  # its last segment has one token
    trainer = new_trainer()
    scores, metrics = trainer.take_in([shard_of([*records[:3], *odd])], 0, [0])
    assert metrics["drafter/buffer_tokens"] == 5 * 13 + 5
    assert scores.prompts == [record.prompt_key for record in records[:3]] and not enough(scores.prompts)
    assert np.isfinite(scores.serving[-1].steps).all()


def test_a_candidate_waits_for_enough_rollouts_while_training_goes_on(new_trainer, target, shard_of, tmp_path):
    """Steps of 4 prompts x 2 samples, of which two are enough. A resume in between changes nothing."""

    def step(trainer, number, judged=0):
        shards = [shard_of(target.rollouts(4, 2, seed=number, policy_version=0))]
        scores, _ = trainer.take_in(shards, 0, [0], judged)
        trainer.train(number, 3)
        return scores

    trainer = new_trainer()
    first = step(trainer, 1)
    assert first.candidate is None and not enough(first.prompts)
    candidate = weights_of(trainer)
    second = step(trainer, 2)
    assert (second.updates, enough(second.gathered.prompts), len(second.prompts)) == (3, False, 8)
    trainer.save(tmp_path / "saved")
    resumed = new_trainer()
    resumed.load(tmp_path / "saved")
    found = []
    for one in (trainer, resumed):
        third = step(one, 3)
        assert third.updates == 3, "the weights of after step 1, although training has gone on"
        assert enough(third.gathered.prompts) and third.gathered.steps == 2 and len(third.prompts) == 8
        for old, new, both in zip(second.candidate, third.candidate, third.gathered.candidate, strict=True):
            assert np.array_equal(both.accepted, np.concatenate([old.accepted, new.accepted]))
        found.append([third.gathered.prompts, lengths_of(third.gathered), weights_of(one)["norm.weight"].tolist()])
    assert found[0] == found[1] and found[0][0] == second.prompts + third.prompts
    later = step(resumed, 4, judged=3)
    assert later.updates == 9 and len(later.gathered.prompts) == 8, "it was judged, and the next one has begun"
    trainer.publish()
    served = trainer._published[1].state_for_serving()
    assert all(torch.equal(candidate[name], served[name]) for name in candidate), "what was scored is published"
    assert trainer.take_in([], 1, [0], 3)[0].updates == 9


def test_a_drafter_is_judged_on_last_segments_with_what_came_before_as_their_prompt(new_trainer, target, shard_of):
    rollouts = target.rollouts(8, 2, seed=3, policy_version=0)
    # The same texts twice: as they are, and with the first 12 response tokens made part of the prompt by hand.
    mixed = [replace(record, earlier_tokens=12) for record in rollouts]
    by_hand = [replace(record, prompt_length=record.prompt_length + 12) for record in rollouts]
    lengths, steps = [], []
    for records in (rollouts, mixed, by_hand):
        trainer = new_trainer()
        scores, _ = trainer.take_in([shard_of(records)], 0, [0])
        lengths.append(lengths_of(scores)[0])
        steps.append(float(scores.serving[-1].steps.sum()))
        if records is mixed:
            assert sorted(set(scores.prompts)) == sorted({record.prompt_key for record in rollouts})
    assert lengths[1] == pytest.approx(lengths[2]) and steps[1] == pytest.approx(steps[2])
    assert steps[1] < 0.6 * steps[0]


def test_what_is_published_is_what_was_scored_however_the_trainer_goes_on(new_trainer, target, shard_of, tmp_path):
    trainer = new_trainer()
    run_steps(trainer, target, shard_of, [1])
    scored = weights_of(trainer)
    trainer.publish()
    run_steps(trainer, target, shard_of, [2])
    served = trainer._published[1].state_for_serving()
    assert all(torch.equal(scored[name], served[name]) for name in scored)
    assert any(not torch.equal(scored[name], tensor) for name, tensor in weights_of(trainer).items())
    trainer.save_checkpoint(tmp_path / "served", 1)
    stored = load_file(tmp_path / "served" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in served.items())


def test_an_earlier_publication_comes_back_under_a_new_version(new_trainer, target, shard_of, tmp_path):
    trainer = new_trainer()
    run_steps(trainer, target, shard_of, [1])
    good = weights_of(trainer)
    trainer.publish()
    run_steps(trainer, target, shard_of, [2])
    trainer.publish()
    assert trainer.publish(1) == 3
    trainer.save(tmp_path / "saved")
    loaded = new_trainer()
    loaded.load(tmp_path / "saved")
    for one in (trainer, loaded):
        assert all(torch.equal(good[name], tensor) for name, tensor in one._published[3].state_for_serving().items())
    loaded.take_in([], 3, [2])
    with pytest.raises(KeyError):
        loaded._published[1]


def test_a_cosine_schedule_ends_with_the_last_training_round(new_trainer, target, shard_of):
    """10 steps, of which every third trains."""
    trainer = new_trainer(train_every=3, optimizer={"learning_rate": 1e-3, "schedule": "cosine"})
    add(trainer, [shard_of(target.rollouts(4, 2, seed=1, policy_version=0))])
    rates = [trainer.train(step, 3)["drafter/learning_rate"] for step in (3, 6, 9)]
    assert rates[0] > rates[1] > rates[2] == pytest.approx(1e-4)
