"""The schema of SYSTEM.toml: a system to simulate."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.functional_validators import model_validator

from cotrain.config.errors import validated
from cotrain.config.load import Table, merge, read_tables
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.step_time import MeasuredCells
from drafters.config import Section


class EnginesConfig(Section):
    """The rollout engines, and everything in a step besides their work."""

    engines: PositiveInt = 1
    """Rollout engines."""
    max_num_seqs: PositiveInt = 256
    """Most requests that an engine runs at once; others wait."""
    learner_seconds: NonNegativeFloat = 0.0
    """Seconds of a step in log probabilities, training, sending the weights, and all else but the engines' work."""
    lag: NonNegativeInt = 0
    """Steps that generation may run ahead of the learner, on separate machines; 0 is synchronous."""


class CellsCost(Section):
    """Measured step times."""

    type: Literal["cells"] = "cells"
    """Where step times come from: measured steps."""
    cells: Annotated[tuple[tuple[NonNegativeInt, PositiveInt, PositiveFloat], ...], Field(min_length=1)]
    """[draft length, batch size, milliseconds of a decode step] of each measurement; repeated ones count as their median."""
    prefill_tokens_per_s: PositiveFloat | None = None
    """Prompt tokens computed per second. Default: prompts take no time."""

    def step_times(self) -> MeasuredCells:
        cells = {(k, n): median(ms for *at, ms in self.cells if at == [k, n]) / 1e3 for k, n, _ in self.cells}
        return MeasuredCells(cells, self.prefill_tokens_per_s)


class WorkloadConfig(Section):
    """What a step generates. Response lengths are given in `groups`, or drawn from a log-normal distribution."""

    prompt_tokens: NonNegativeFloat = 200
    """Tokens of a prompt."""
    responses: PositiveInt = 1024
    """Responses of a step."""
    mean_length: PositiveFloat | None = None
    """Mean tokens of a response before the limit cuts it."""
    sigma: NonNegativeFloat = 1.0
    """Standard deviation of the logarithm of a length."""
    limit: PositiveInt = 32768
    """Most tokens of a response."""
    groups: tuple[tuple[Annotated[tuple[PositiveInt, ...], Field(min_length=1)], ...], ...] = ()
    """Tokens of real responses: a list for each step, in it a list for each prompt. They replace the four fields above, and the
    answer is the mean over these steps."""

    @model_validator(mode="after")
    def _lengths_in_one_way(self) -> "WorkloadConfig":
        drawn = sorted({"responses", "mean_length", "sigma", "limit"} & self.model_fields_set)
        if self.groups and drawn:
            raise ValueError(f"{', '.join(drawn)} would have no effect beside groups; leave that out")
        if not self.groups and self.mean_length is None:
            raise ValueError("give mean_length, or the lengths of real responses as groups")
        return self

    def lengths(self, seed: int = 0) -> list[list[list[int]]]:
        """Return the tokens of the responses to each prompt of each step. The seed is for lengths that are drawn."""
        if self.groups or self.mean_length is None:
            return [[[*group] for group in step] for step in self.groups]
        chance = np.random.default_rng(seed).standard_normal((1, self.responses, 1))
        drawn = np.rint(self.mean_length * np.exp(self.sigma * chance - self.sigma**2 / 2))
        return drawn.clip(1, self.limit).astype(int).tolist()


class DrafterConfig(Section):
    """Speculation; without this section there is none."""

    accept: tuple[float, ...]
    """Share of drafts of which at least 1, 2, ... tokens are accepted."""
    by_depth: tuple[tuple[NonNegativeInt, tuple[float, ...]], ...] = ()
    """[first response token, accept from that token on], if acceptance changes within a response."""
    k: NonNegativeInt = 3
    """Draft tokens per request and step; the largest number when adaptive."""
    adaptive: bool = False
    """At each batch size, do the engines use the draft length from 0 to k that gives the most tokens per second?"""
    training_seconds: NonNegativeFloat = 0.0
    """Seconds in which each step waits for the training of the drafter."""

    @model_validator(mode="after")
    def _is_possible(self) -> "DrafterConfig":
        self.acceptance()
        return self

    def acceptance(self) -> Acceptance:
        """Return the acceptance of drafts. Raises ValueError for impossible values."""
        return Acceptance(self.accept, self.by_depth)


class System(Section):
    """A system to simulate."""

    system: EnginesConfig = EnginesConfig()
    cost: CellsCost
    """Step times: a section [cost] with cells."""
    workload: WorkloadConfig
    """What a step generates: a section [workload] with mean_length or groups."""
    drafter: DrafterConfig | None = None


def load_system(base: str | Path | Table, overrides: Sequence[str] = ()) -> System:
    """Load a SYSTEM.toml, or take its fields, and apply key=value overrides. Raises ConfigError listing all problems."""
    table = base if isinstance(base, dict) else read_tables([base], [])[0]
    return validated(System, merge(table, reduce(merge, read_tables([], overrides), {})))
