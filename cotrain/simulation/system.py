"""The schema of SYSTEM.toml: a system to simulate."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.functional_validators import AfterValidator, model_validator

from cotrain.config.errors import ConfigError, validated
from cotrain.config.load import Table, merge, read_tables
from cotrain.run.provenance import flatten
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.roofline import Roofline, entries, known
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


class RooflineCost(Section):
    """Step times from data sheets, shapes, and constants fitted to measured operators."""

    type: Literal["roofline"]
    """Where step times come from."""
    gpu: Annotated[str, AfterValidator(lambda name: known("hardware", name))]
    """GPU, by its name in cotrain/simulation/data/hardware.toml."""
    model: Annotated[str, AfterValidator(lambda name: known("models", name))]
    """Policy, by its name in cotrain/simulation/data/models.toml, with or without its organisation on the hub."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    drafter: Literal["eagle3", "mtp"] = "eagle3"
    """Kind of drafter, given a [drafter]."""
    graph_tokens: PositiveInt | None = None
    """Largest step with a captured CUDA graph, in tokens: requests times (draft length + 1). Default: all steps have one.
    Before its pull request 50488 of 2026-07-30, vLLM captured graphs of up to min(2 max_num_seqs, 512) tokens."""
    host_step_ms: NonNegativeFloat | None = None
    """Time that the host adds to each step. Default of this and the next two fields: the value in hardware.toml."""
    host_draft_ms: NonNegativeFloat | None = None
    """Time that the host adds for each pass of the drafter."""
    eager_layer_ms: NonNegativeFloat | None = None
    """Least time of each layer of the policy in a step without a captured graph."""
    drafted_k: tuple[PositiveInt, ...] = ()
    """Draft lengths of steps that were measured on this very system, and to which these constants were adjusted. Without such a
    step, or with longer drafts, a prediction is only an envelope."""

    @model_validator(mode="after")
    def _fits(self) -> "RooflineCost":
        model, gpu = entries("models")[self.model], entries("hardware")[self.gpu]
        if (weights := 2 * model.parameters(model.experts) / self.tensor_parallel) > gpu.memory_bytes:
            held = f"{weights / 1e9:.0f} GB of weights, more than a {self.gpu} holds"
            raise ValueError(f"a GPU has {held}; raise tensor_parallel, or choose a larger gpu")
        return self

    def step_times(self) -> Roofline:
        names = ("host_step", "host_draft", "eager_layer")
        given = {f"{name}_s": ms / 1e3 for name in names if (ms := getattr(self, f"{name}_ms")) is not None}
        gpu = replace(entries("hardware")[self.gpu], **given)
        policy = entries("models")[self.model]
        return Roofline(gpu, policy, policy.drafter(self.drafter), self.tensor_parallel, self.graph_tokens or np.inf)


class CellsCost(Section):
    """Measured step times."""

    type: Literal["cells"]
    """Where step times come from."""
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

    accept: tuple[float, ...] | None = None
    """Share of drafts of which at least 1, 2, ... tokens are accepted."""
    by_depth: tuple[tuple[NonNegativeInt, tuple[float, ...]], ...] = ()
    """[first response token, accept from that token on], if acceptance changes within a response."""
    acceptance_length: tuple[PositiveFloat, PositiveInt] | None = None
    """In place of accept: [tokens that a verification step emits on average, with so many draft tokens]."""
    k: NonNegativeInt = 3
    """Draft tokens per request and step; the largest number when adaptive."""
    adaptive: bool = False
    """At each batch size, do the engines use the draft length from 0 to k that gives the most tokens per second?"""
    training_seconds: NonNegativeFloat = 0.0
    """Seconds in which each step waits for the training of the drafter."""

    @model_validator(mode="after")
    def _acceptance_in_one_way(self) -> "DrafterConfig":
        self.acceptance()
        return self

    def acceptance(self) -> Acceptance:
        """Return the acceptance of drafts. Raises ValueError for impossible values, and unless it is given in exactly one way."""
        if (self.accept is None) == (self.acceptance_length is None) or (self.by_depth and self.accept is None):
            raise ValueError("give either accept, and by_depth where it changes, or acceptance_length")
        if self.acceptance_length:
            return Acceptance.from_length(*self.acceptance_length)
        return Acceptance(self.accept or (), self.by_depth)


class System(Section):
    """A system to simulate."""

    system: EnginesConfig = EnginesConfig()
    cost: Annotated[RooflineCost | CellsCost, Field(discriminator="type")]
    """Step times: a section [cost] with type = "roofline" or "cells"."""
    workload: WorkloadConfig
    """What a step generates: a section [workload] with mean_length or groups."""
    drafter: DrafterConfig | None = None


def load_system(base: str | Path | Table, overrides: Sequence[str] = ()) -> System:
    """Load a SYSTEM.toml, or take its fields, and apply key=value overrides. Raises ConfigError listing all problems."""
    table = base if isinstance(base, dict) else read_tables([base], [])[0]
    changes: Table = reduce(merge, read_tables([], overrides), {})
    system, changed = validated(System, merge(table, changes)), flatten(changes)
    others = {f"cost.{name}" for name in ("gpu", "model", "tensor_parallel", "drafter")} & changed.keys()
    kept = isinstance(system.cost, RooflineCost) and system.cost.drafted_k and "cost.drafted_k" not in changed
    if kept and others:
        fix = "give cost.drafted_k=[], and host_draft_ms and eager_layer_ms anew or none for the defaults"
        raise ConfigError([f"{', '.join(sorted(others))}: cost.drafted_k was measured with another; {fix}"])
    return system
