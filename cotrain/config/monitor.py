"""How closely a run checks that its rollouts have the policy's distribution. Imports no torch."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from drafters.config import Section

LEAST_SPECULATED = 100
"""Fewest speculated tokens of a check. So many find a total variation distance of 0.26 in the first check of a run with
probability 0.9 (family.detectable_distance); with fewer, only the grossest faults could fail."""


class MonitorConfig(Section):
    """Checks of tokens in rollouts that were generated anyway; the first is of the first step with enough of them."""

    every: NonNegativeInt = 10
    """Steps between two checks, or more where a check takes long or little was speculated; 0 makes none."""

    tokens: PositiveInt = 2048
    """Tokens of one check's forward pass of the policy, prompts included."""

    max_share: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Largest share of a run's time that goes into checks; the first one is made whatever it costs."""
