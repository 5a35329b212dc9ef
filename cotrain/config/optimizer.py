"""The optimizer of the policy, and what that of the drafter shares with it. Imports no torch."""

from typing import Literal, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from cotrain.config import rules as config_rules
from drafters.config import Section


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's running-average coefficients."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from zero."""

    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up; cosine falls to a tenth at the end of the run."""

    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""

    @model_validator(mode="after")
    def _keeps_rules(self) -> Self:
        return config_rules.check(self, config_rules.OPTIMIZER)
