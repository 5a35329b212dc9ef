"""How much of a step is tapped: what rounds train on and drafters are judged by, and some to spare."""

from typing import Any

import pytest

from cotrain.config.schema import RolloutConfig
from cotrain.records import Rollout, ScoredRollout, Versions
from cotrain.trainer.spec import tap_share


def rollouts_of(*lengths: int) -> list[ScoredRollout]:
    versions = Versions(0, 0)
    rollouts = [Rollout("p", 0, [1] * 10, [2] * (n - 10), [], "", "stop", versions) for n in lengths]
    return [ScoredRollout(rollout, 0.0, 0.0) for rollout in rollouts]


DRAFTER = {"model": {"type": "eagle3"}, "updates_per_step": 8, "batch_tokens": 8192}


@pytest.mark.parametrize(
    ("changes", "rollouts"),
    [
        ({}, 1.5 * 65_536 / 1000),
        ({"batch_tokens": 512}, 1.5 * 32),  # less than is judged by
        ({"train": False}, 1.5 * 32),
        ({"train_every": 2}, 1.5 * 65_536 / 2000),
        ({"train_every": 4}, 1.5 * 65_536 / 2000),  # of which the first two steps are too old
        ({"train_every": 4, "buffer": {"max_age": 3}}, 1.5 * 32),
        ({"train_every": 2, "buffer": {"max_age": 0}}, 1.5 * 65_536 / 1000),
    ],
)
def test_the_share_of_a_large_step(run_config: Any, changes: dict[str, Any], rollouts: float) -> None:
    rollout = RolloutConfig(prompts_per_step=64, samples_per_prompt=16)
    config = run_config(rollout=rollout, drafter=DRAFTER | changes)
    assert tap_share(config, rollouts_of(500, 1500)) * 1024 == pytest.approx(rollouts)


def test_all_of_a_small_step_is_tapped_and_of_a_step_whose_lengths_are_unknown(run_config: Any) -> None:
    long = rollouts_of(100_000)
    assert tap_share(run_config(drafter=DRAFTER), long) < 1.0
    small = RolloutConfig(prompts_per_step=8, samples_per_prompt=4)
    assert tap_share(run_config(rollout=small, drafter=DRAFTER), long) == 1.0
    large = RolloutConfig(prompts_per_step=64, samples_per_prompt=16)
    assert tap_share(run_config(rollout=large, drafter=DRAFTER | {"train": False}), []) == 1.0
