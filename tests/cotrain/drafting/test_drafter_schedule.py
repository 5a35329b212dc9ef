import pytest

from cotrain.config import DrafterConfig
from cotrain.drafting.schedule import num_updates, should_publish, should_train


@pytest.mark.parametrize(
    ("train_every", "publish_every", "trains", "publishes"),
    [
        (1, 1, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
        (2, 1, [2, 4, 6], [2, 4, 6]),
        (1, 3, [1, 2, 3, 4, 5, 6], [3, 6]),
        (2, 2, [2, 4, 6], [4]),
    ],
)
def test_trains_every_nth_step_and_publishes_every_nth_of_those(train_every, publish_every, trains, publishes):
    config = DrafterConfig(model={"type": "eagle3"}, train_every=train_every, publish_every=publish_every)
    assert [step for step in range(1, 7) if should_train(config, step)] == trains
    assert [step for step in range(1, 7) if should_publish(config, step)] == publishes
    assert num_updates(config, 6) == len(trains) * config.updates_per_step


def test_frozen_drafter_never_trains():
    config = DrafterConfig(model={"type": "eagle3"}, train=False)
    assert not any(should_train(config, step) or should_publish(config, step) for step in range(1, 7))
