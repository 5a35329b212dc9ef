"""Configuration of the speculation controller. Imports no torch, so that --help stays fast."""

from pydantic import PositiveFloat

from drafters.config import Section


class SpeculationConfig(Section):
    """How the draft length is chosen while the engine runs."""

    adaptive: bool = True
    """Choose the draft length for each batch size while running, 0 included. False drafts rollout.draft_tokens in
    every step, whether it pays or not."""

    measure_seconds: PositiveFloat = 60.0
    """Seconds after which no further batch of requests is measured at the start."""
