import pytest

from cotrain.config.schema import DrafterConfig
from cotrain.trainer.schedule import num_updates


@pytest.mark.parametrize(("train_every", "train_when", "sessions"), [(1, "every", 7), (3, "every", 2), (1, "drift", 7)])
def test_the_schedule_is_as_long_as_all_sessions_that_there_can_be(train_every, train_when, sessions):
    gate = {"train_when": train_when}
    config = DrafterConfig(model={"type": "eagle3"}, train_every=train_every, updates_per_step=5, gate=gate)
    assert num_updates(config, 7) == sessions * 5
