"""The planned order of an offline epoch."""

import random

from pipelines.initialise.epoch_plan import cut_segments, plan_epoch

LENGTHS = [random.Random(i).randint(5, 60) for i in range(200)]


def test_segments_keep_their_bounds():
    segments = cut_segments(LENGTHS, max_rollouts=16, max_tokens=400)
    assert [i for segment in segments for i in segment] == list(range(200))
    assert all(len(segment) <= 16 and sum(LENGTHS[i] for i in segment) <= 400 for segment in segments)
    assert cut_segments([500, 3], 16, 400) == [range(0, 1), range(1, 2)]
    assert cut_segments([], 16, 400) == []


def test_an_epoch_visits_every_rollout_once_within_its_bounds():
    segments = cut_segments(LENGTHS, 16, 400)
    mixes = plan_epoch(LENGTHS, segments, max_tokens=1500, batch_tokens=128, seed=3, epoch=0)
    assert sorted(i for mix in mixes for batch in mix.batches for i in batch) == list(range(200))
    assert len(mixes) > 2
    for mix in mixes:
        held = [i for number in mix.segments for i in segments[number]]
        assert sum(LENGTHS[i] for i in held) <= 1500
        assert sorted(held) == sorted(i for batch in mix.batches for i in batch)
        sizes = [sum(LENGTHS[i] for i in batch) for batch in mix.batches]
        assert max(sizes) <= 128 and min(sizes) > 128 / 4


def test_the_order_depends_on_seed_and_epoch_alone():
    segments = cut_segments(LENGTHS, 16, 400)
    first = plan_epoch(LENGTHS, segments, 1500, 128, seed=3, epoch=0)
    assert plan_epoch(LENGTHS, segments, 1500, 128, seed=3, epoch=0) == first
    assert plan_epoch(LENGTHS, segments, 1500, 128, seed=3, epoch=1) != first
    assert plan_epoch(LENGTHS, segments, 1500, 128, seed=4, epoch=0) != first


def test_a_rollout_longer_than_a_batch_comes_alone():
    mixes = plan_epoch([300, 5, 5], [range(3)], 1000, 64, seed=0, epoch=0)
    assert [0] in mixes[0].batches
