"""How closely a run watches that its rollouts have the policy's distribution. Imports no torch."""

from typing import Annotated

from pydantic import Field, PositiveInt

from drafters.config import Section


class MonitorConfig(Section):
    """Looks at tokens of rollouts that were generated anyway."""

    enabled: bool = True
    """Look at the first step, and then now and then."""

    every: PositiveInt = 10
    """Steps between two looks, or more where a look takes long."""

    tokens: PositiveInt = 2048
    """Tokens of one look's forward pass of the policy, prompts included."""

    max_share: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Largest share of a run's time that goes into looks; the first one always takes place."""

    false_alarm_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Chance that any look of a run raises an alarm although rollouts are as they should be."""
