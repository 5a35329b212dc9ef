"""Length of the drafter's learning-rate schedule. Imports no torch."""

from cotrain.config.schema import DrafterConfig


def num_updates(config: DrafterConfig, total_steps: int) -> int:
    """Optimizer steps in a run of total_steps steps, if it trains in every step that it may."""
    every = config.train_every if config.gate.train_when == "every" else 1
    return total_steps // every * config.updates_per_step
