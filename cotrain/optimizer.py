"""AdamW and its learning-rate schedule."""

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from cotrain.config.schema import OptimizerConfig

BETAS = (0.9, 0.95)  # AdamW's running-average coefficients, as usual for language models
MAX_GRAD_NORM = 1.0
COSINE_FLOOR = 0.1  # share of the peak learning rate at which a cosine schedule ends


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) as a share of the peak.

    Warm-up step i runs at (i + 1) / (warmup_steps + 1). So the warm-up is linear from zero, but skips zero itself, because
    a step of rollouts is too expensive to be spent on a learning rate of 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    return COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * progress)) / 2


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, total_steps: int
) -> tuple[AdamW, LambdaLR]:
    """Return AdamW over `parameters`, and a schedule to be stepped once after each of `total_steps` optimizer steps."""
    optimizer = AdamW(parameters, lr=config.learning_rate, betas=BETAS, weight_decay=0.0, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, total_steps))
