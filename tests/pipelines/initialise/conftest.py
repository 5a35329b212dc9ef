"""A tiny target and rollouts of it, shared with the tests of the drafter trainer."""

from tests.cotrain.trainer.conftest import new_trainer, shard_of, target

__all__ = ["new_trainer", "shard_of", "target"]
