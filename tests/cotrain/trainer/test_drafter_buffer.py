from dataclasses import replace
from itertools import chain

import pytest
import torch

from cotrain.trainer.buffer import FeatureBuffer, batches_of, pack, spread_over_prompts, teacher_of
from tests.cotrain.trainer.conftest import SAMPLING, make_record

PLENTY = 10**9


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def prompts_in(batch):
    """The prompt tokens (see make_record) of a batch's rollouts."""
    starts = (batch.positions == 0).nonzero().flatten()
    return batch.token_ids[starts].tolist()


def test_oldest_leave_when_bytes_run_out():
    records = [make_record(prompt=i) for i in range(5)]
    buffer = FeatureBuffer(max_bytes=3 * records[0].num_bytes + 1, max_age=0)
    buffer.add(records[:2])
    buffer.add(records[2:])
    assert buffer.records == records[2:]
    metrics = buffer.metrics()
    assert metrics["drafter/buffer_bytes"] == 3 * records[0].num_bytes <= buffer.max_bytes
    assert metrics["drafter/buffer_tokens"] == 30
    assert metrics["drafter/buffer_dropped_for_bytes"] == 2


def test_versions_leave_by_age():
    buffer = FeatureBuffer(PLENTY, max_age=1)
    for version in (0, 1, 2):
        buffer.add([make_record(prompt=version, policy_version=version)])
    assert buffer.policy_versions == {1, 2}
    buffer.add([make_record(policy_version=0)])  # late: too old on arrival
    assert buffer.policy_versions == {1, 2}
    assert buffer.metrics()["drafter/buffer_dropped_for_age"] == 2
    buffer.add([make_record(policy_version=9)])
    assert buffer.policy_versions == {9}


def test_rollouts_without_a_supervised_position_do_not_enter():
    hollow = make_record()
    hollow.feature_mask[:] = False
    buffer = FeatureBuffer(PLENTY, max_age=0)
    buffer.add([hollow, make_record(prompt=1)])
    assert len(buffer.records) == 1
    assert buffer.metrics()["drafter/untrainable_rollouts"] == 1


def test_batches_are_whole_rollouts_of_one_version_within_the_bound():
    buffer = FeatureBuffer(PLENTY, max_age=1)
    for version in (3, 4):
        buffer.add(
            [make_record(prompt=10 * version + i, response_length=2 + i, policy_version=version) for i in range(8)]
        )
    rng = generator()
    for _ in range(30):
        batch = buffer.sample(25, rng).rows
        prompts = prompts_in(batch)
        assert {prompt // 10 for prompt in prompts} == {batch.policy_version}
        assert len(batch.token_ids) == sum(6 + prompt % 10 for prompt in prompts) <= 25


def test_batches_are_of_one_sampling_and_none_is_left_behind():
    """The records of two samplings come in turns, as they do from a server."""
    samplings = [SAMPLING, replace(SAMPLING, temperature=0.0)]
    records = [make_record(prompt=p, sampling=samplings[p % 2]) for p in range(8)]
    buffer = FeatureBuffer(PLENTY, max_age=0)
    buffer.add(records)
    rng = generator()
    batches = [buffer.sample(20, rng) for _ in range(4)]
    for rows, sampling in [*batches, *batches_of(records, batch_tokens=20)]:
        assert {samplings[prompt % 2] for prompt in prompts_in(rows)} == {sampling}
    assert sorted(chain(*(prompts_in(rows) for rows, _ in batches))) == list(range(8))
    alike = sorted(records, key=teacher_of)
    assert [len(rows.token_ids) for rows, _ in batches_of(alike, batch_tokens=20)] == [20] * 4


def test_longer_rollout_comes_alone():
    buffer = FeatureBuffer(PLENTY, max_age=0)
    buffer.add([make_record(prompt=1, response_length=50), make_record(prompt=2, response_length=5)])
    rng = generator()
    assert sorted(len(buffer.sample(20, rng).rows.token_ids) for _ in range(2)) == [9, 54]


def test_without_replacement_newest_first_then_all_again():
    buffer = FeatureBuffer(PLENTY, max_age=1)
    old, new = range(10, 15), range(20, 25)
    buffer.add([make_record(prompt=p, policy_version=1) for p in old])
    buffer.add([make_record(prompt=p, policy_version=2) for p in new])
    rng = generator()
    epochs = [[prompts_in(buffer.sample(20, rng).rows) for _ in range(6)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(chain(*epoch[:3])) == list(new)
        assert sorted(chain(*epoch[3:])) == list(old)
    assert epochs[0] != epochs[1]


def test_fresh_rollouts_come_before_the_rest_of_the_epoch():
    buffer = FeatureBuffer(PLENTY, max_age=1)
    buffer.add([make_record(prompt=p, policy_version=1) for p in range(10, 14)])
    rng = generator()
    first = prompts_in(buffer.sample(10, rng).rows)
    buffer.add([make_record(prompt=20, policy_version=2)])
    assert prompts_in(buffer.sample(10, rng).rows) == [20]
    rest = [prompts_in(buffer.sample(10, rng).rows) for _ in range(3)]
    assert sorted(chain(first, *rest)) == [10, 11, 12, 13]


def test_a_version_is_split_evenly_rather_than_into_a_small_last_batch():
    buffer = FeatureBuffer(PLENTY, max_age=0)
    buffer.add([make_record(prompt=p) for p in range(12)])
    rng = generator()
    assert [len(buffer.sample(100, rng).rows.token_ids) for _ in range(2)] == [60, 60]


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (2, [0, 4]),
        (3, [0, 4, 5]),
        (4, [0, 1, 4, 5]),
        (5, [0, 1, 4, 5, 6]),
        (6, [0, 1, 2, 4, 5, 6]),
        (99, list(range(7))),
    ],
)
def test_a_bounded_number_of_rollouts_is_spread_over_the_prompts(most, kept):
    prompts = [1, 1, 1, 1, 2, 3, 3]  # in the order of generation
    records = [make_record(prompt=p, response_length=3 + i) for i, p in enumerate(prompts)]
    assert [records.index(record) for record in spread_over_prompts(records, most)] == kept


def test_all_batches_cover_the_records_in_order():
    records = [make_record(prompt=p, policy_version=p // 3) for p in range(6)]
    batches = [rows for rows, _ in batches_of(records, batch_tokens=20)]
    assert [prompts_in(batch) for batch in batches] == [[0, 1], [2], [3, 4], [5]]
    assert [batch.policy_version for batch in batches] == [0, 0, 1, 1]


def test_pack_marks_documents_positions_and_responses():
    batch = pack([make_record(response_length=2), make_record(prompt=1, response_length=1)]).rows
    assert batch.document_ids.tolist() == [0] * 6 + [1] * 5
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert batch.response_mask.nonzero().flatten().tolist() == [4, 5, 10]
    assert (~batch.feature_mask).nonzero().flatten().tolist() == [5, 10]


def test_a_batch_has_log_probabilities_if_all_of_its_rollouts_have():
    records = [replace(record, log_probs=torch.rand(record.num_tokens)) for record in map(make_record, range(2))]
    both = pack(records).rows.log_probs
    assert both is not None and torch.equal(both, torch.cat([record.log_probs for record in records]))
    assert pack([*records, make_record()]).rows.log_probs is None
    assert records[0].num_bytes == make_record().num_bytes + 4 * records[0].num_tokens
