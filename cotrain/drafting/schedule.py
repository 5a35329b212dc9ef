"""When the drafter trains and when it is published. Steps count from 1. Imports no torch."""

from cotrain.config import DrafterConfig


def should_train(config: DrafterConfig, step: int) -> bool:
    """True in every train_every-th step; never for a frozen drafter."""
    return config.train and step % config.train_every == 0


def should_publish(config: DrafterConfig, step: int) -> bool:
    """True in every publish_every-th step that trained."""
    return should_train(config, step) and step // config.train_every % config.publish_every == 0


def num_updates(config: DrafterConfig, total_steps: int) -> int:
    """Optimizer steps in a run of total_steps steps: the length of the learning-rate schedule."""
    return total_steps // config.train_every * config.updates_per_step
