"""Configuration of the speculation controller. Imports no torch, so that --help stays fast."""

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from drafters.config import Section


class SpeculationConfig(Section):
    """How the draft length is chosen while the engine runs."""

    adaptive: bool = True
    """Choose the draft length for each batch size while running, 0 included. False drafts rollout.draft_tokens in
    every step, whether it pays or not."""

    measure_batch_sizes: tuple[PositiveInt, ...] | None = None
    """Batch sizes timed at the start, ascending. Default: 1, 4, 16, ... and the most requests an engine runs at once."""

    measure_repeats: PositiveInt = 2
    """Times each draft length is timed at each of these batch sizes; the lower quartile counts. Up to eight times as
    often again where it is then in doubt whether speculation pays, or at which length."""

    measure_seconds: PositiveFloat = 60.0
    """Seconds after which no further batch size is timed at the start; what was left out is learnt while running."""

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.8
    """Speculation comes on where it pays with this probability (one-sided lower bound of the gain), and goes off where
    the estimate says that it costs. Closer to 1 it stays off where it gains little, closer to 0.5 it is on for a while
    where it costs a little."""

    hysteresis: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """The draft length changes only for a gain that is larger by this share."""

    probe_share: Annotated[float, Field(ge=0, le=0.2)] = 0.02
    """Most of the decoding time spent on draft lengths other than the chosen one: trials of speculation where it is
    off, and steps without speculation that check the reported speed-up where it is on. 0 never looks again."""

    probe_steps: Annotated[int, Field(ge=2, le=64)] = 8
    """Engine steps of one such trial. The first only drafts, so that a trial of n steps gives n - 1 timings."""

    memory_drafts: Annotated[int, Field(ge=50)] = 2000
    """Drafts after which an observed acceptance counts half. Sudden changes are noticed sooner, by a test of their
    own."""

    @model_validator(mode="after")
    def _batch_sizes_ascend(self) -> Self:
        sizes = self.measure_batch_sizes
        if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes))):
            raise PydanticCustomError(
                "measure_batch_sizes",
                "measure_batch_sizes: must be ascending and without repeats, got {sizes}; leave it out for the default",
                {"sizes": list(sizes)},
            )
        return self
