"""How closely a run watches that its rollouts have the policy's distribution. Imports no torch."""

from typing import Annotated

from pydantic import Field, PositiveInt

from drafters.config import Section

LEAST_SPECULATED = 100
"""Fewest speculated tokens of a look. So many find a total variation distance of 0.26 in the first look of a run with
probability 0.9 (power.detectable_distance); with fewer, only the grossest faults could fail."""


class MonitorConfig(Section):
    """Looks at tokens of rollouts that were generated anyway."""

    enabled: bool = True
    """Look at the first step with enough speculated tokens, and then now and then."""

    every: PositiveInt = 10
    """Steps between two looks, or more where a look takes long or little was speculated."""

    tokens: PositiveInt = 2048
    """Tokens of one look's forward pass of the policy, prompts included."""

    max_share: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Largest share of a run's time that goes into looks; the first one is taken whatever it costs."""

    false_alarm_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Chance that any look of a run raises an alarm although rollouts are as they should be. This holds as long as no
    logit of the engine differs from the policy learner's by more than rounding is taken to explain (0.0005 in float32,
    0.5 in bfloat16), and top-k and top-p cut at another token for 1 % of the tokens at most."""
