"""When the drafter's alarms fire. Imports no torch."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from drafters.config import Section


class AlarmConfig(Section):
    """Bounds beyond which a step counts as a failure of the drafter."""

    false_alarm_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Chance that the statistical alarms of a whole run fire although the drafter is healthy. Shared out evenly over
    the steps of the run."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Share of the expected gain (expected acceptance length - 1) by which the served one may fall short beyond its
    noise: it is expected in float32, of features in the engine's number format."""

    max_lag_versions: PositiveInt | None = None
    """Most policy versions from the rollouts on which the gate last judged the serving drafter, or the trigger found no
    need to train it, to those it drafts for. Default: twice drafter.train_every x drafter.publish_every."""

    delivery_check_every: NonNegativeInt = 10
    """Read back the drafter weights that the engines serve in every n-th step, and compare them with those sent, beside
    the read-back of each update. 0: never."""
