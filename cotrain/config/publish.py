"""When a drafter is published, and when it counts as failed. Imports no torch.

Lengths and gains are acceptance lengths: mean tokens emitted per verification step.
"""

from typing import Annotated, Literal

from pydantic import Field

from drafters.config import Section

MIN_ROLLOUTS = 16
"""The gate needs this many rollouts of a step: below that, ratios of their sums are biased by a few long responses."""

MIN_PROMPTS = 4
"""Noise is estimated from this many prompts or more. With two or three, the degrees of freedom of Student's t are a
guess themselves, and the far tail that alarms use is reached 6 to 50 times too often."""


class GateConfig(Section):
    """When a candidate replaces the drafter that serves."""

    publish_when: Literal["gain", "always"] = "gain"
    """gain: only a candidate that is certain to beat the serving drafter on rollouts neither was trained on, and by more
    seconds than a swap costs. always: every candidate, unless its acceptances are not finite."""


class AlarmConfig(Section):
    """Bounds beyond which a step counts as a failure of the drafter."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Share of the expected gain (expected acceptance length - 1) by which the served one may fall short beyond its
    noise: it is expected in float32, of features in the engine's number format."""
