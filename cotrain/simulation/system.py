"""The schema of SYSTEM.toml: a system to simulate."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo
from pydantic.functional_validators import field_validator, model_validator

from cotrain.config.errors import ConfigError, did_you_mean, validated
from cotrain.config.load import Table, merge, read_tables
from cotrain.run.provenance import flatten
from cotrain.simulation.generation import Acceptance
from cotrain.simulation.roofline import CalibratedRoofline, Engine, Hardware, Model, Roofline, entries
from cotrain.simulation.step_time import MeasuredCells
from drafters.config import BLOCK_DRAFTERS, Section

HEADS = ("eagle3", "mtp", *BLOCK_DRAFTERS)
"""Drafters whose shape follows from the policy's."""

Cells = tuple[tuple[NonNegativeInt, PositiveInt, PositiveFloat], ...]  # (draft length, batch size, ms of a step)


def seconds_by_cell(cells: Cells) -> dict[tuple[int, int], float]:
    return {(k, n): median(ms for *at, ms in cells if at == [k, n]) / 1e3 for k, n, _ in cells}


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
    """Step times from data sheets, shapes, and constants fitted to measured operators. Its fields describe a whole system."""

    type: Literal["roofline"]
    """Where step times come from."""
    models: dict[str, Model] = Field({})
    """Models of your own, as tables [cost.models.NAME] with the fields of those in cotrain/simulation/data/models.toml."""
    gpus: dict[str, Hardware] = Field({})
    """GPUs of your own, as tables [cost.gpus.NAME] with the fields of those in cotrain/simulation/data/gpus.toml: its data sheet's
    memory_bytes, memory_bandwidth and flops, and source. Efficiencies that are left out are an H100's."""
    gpu: str
    """GPU, by its name in data/gpus.toml or `gpus`."""
    model: str
    """Policy, by its name in data/models.toml or `models`, with or without its organisation on the hub."""
    engine: str = "vllm-2026"
    """Version of the engine, by its name in data/engines.toml; it decides the times of the host."""
    async_scheduling: Literal["always", "without_drafts", "never"] | None = None
    """Steps in which asynchronous scheduling hides the host's time. Default: those of the engine's version."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    drafter: str = "eagle3"
    """Kind of drafter, given a [drafter]: eagle3, mtp, dflash, dspark, or the name of a model that drafts."""
    graph_tokens: PositiveInt | None = None
    """Largest step with a captured CUDA graph, in tokens: requests times (draft length + 1). Default: all steps have one.
    Before its pull request 50488 of 2026-07-30, vLLM captured graphs of up to min(2 max_num_seqs, 512) tokens."""
    host_step_ms: NonNegativeFloat | None = None
    """Time of the host in each step. Default of this and the next field: that of the engine's version."""
    host_draft_ms: NonNegativeFloat | None = None
    """Time that the host adds for each pass of the drafter."""
    eager_layer_ms: NonNegativeFloat | None = None
    """Least time of each layer of the policy in a step without a captured graph. Default: that of the GPU."""
    drafted_k: tuple[PositiveInt, ...] = ()
    """Draft lengths of steps that were measured on this very system, and to which these constants were adjusted. Without such a
    step, or with longer drafts, a prediction is only an envelope. Lengths in `cells` need not be repeated."""
    cells: Cells = ()
    """Steps that were measured on this very system, and replace the prediction: [draft length, batch size, milliseconds]."""
    cells_context: NonNegativeFloat = 0
    """Tokens of context of each request in these steps."""
    cells_source: str = ""
    """What they were measured with, which the answer repeats: card, versions, date."""

    @field_validator("gpu", "model", "drafter", "engine")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        """The name without a hub's organisation."""
        file = {"gpu": "gpus", "engine": "engines"}.get(info.field_name or "", "models")
        names = [*(HEADS if info.field_name == "drafter" else ()), *info.data.get(file, ()), *entries(file)]
        if (short := name.rpartition("/")[2]) not in names:
            fix = "" if file == "engines" else f", or describe it in [cost.{file}.NAME]"
            raise ValueError(f"{name!r} is not known: give one of {', '.join(names)}{fix}{did_you_mean(short, names)}")
        return short

    @model_validator(mode="after")
    def _fits(self) -> "RooflineCost":
        model, gpu = self._model(self.model), self._gpu
        weights = model.weight_bytes * model.parameters(model.experts) / self.tensor_parallel
        if weights > gpu.memory_bytes:
            held = f"{weights / 1e9:.0f} GB of weights, more than a {self.gpu} holds"
            raise ValueError(f"a GPU has {held}; raise tensor_parallel, or choose a larger gpu")
        return self

    @property
    def _gpu(self) -> Hardware:
        return (entries("gpus") | self.gpus)[self.gpu]

    def _model(self, name: str) -> Model:
        return (entries("models") | self.models)[name]

    @property
    def host(self) -> Engine:
        """Times of the host: those of the engine's version, unless they are given."""
        given = {"host_step_s": self.host_step_ms, "host_draft_s": self.host_draft_ms}
        engine = replace(entries("engines")[self.engine], **{k: ms / 1e3 for k, ms in given.items() if ms is not None})
        return replace(engine, async_scheduling=self.async_scheduling or engine.async_scheduling)

    def step_times(self) -> Roofline | CalibratedRoofline:
        gpu, policy = self._gpu, self._model(self.model)
        if self.eager_layer_ms is not None:
            gpu = replace(gpu, eager_layer_s=self.eager_layer_ms / 1e3)
        drafter = policy.drafter(self.drafter) if self.drafter in HEADS else self._model(self.drafter)
        times = Roofline(gpu, policy, drafter, self.host, self.tensor_parallel, self.graph_tokens or np.inf)
        return CalibratedRoofline(times, seconds_by_cell(self.cells), self.cells_context) if self.cells else times


class CellsCost(Section):
    """Measured step times."""

    type: Literal["cells"]
    """Where step times come from."""
    cells: Annotated[Cells, Field(min_length=1)]
    """[draft length, batch size, milliseconds of a decode step] of each measurement; repeated ones count as their median."""
    prefill_tokens_per_s: PositiveFloat | None = None
    """Prompt tokens computed per second. Default: prompts take no time."""

    def step_times(self) -> MeasuredCells:
        return MeasuredCells(seconds_by_cell(self.cells), self.prefill_tokens_per_s)


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


def load_system(base: Sequence[str | Path] | Table, overrides: Sequence[str] = ()) -> System:
    """Load SYSTEM.toml files, later ones win, or the fields of a system. Raises ConfigError listing all problems."""
    table = base if isinstance(base, dict) else reduce(merge, read_tables(base, []), Table())
    changes: Table = reduce(merge, read_tables([], overrides), {})
    system, changed = validated(System, merge(table, changes)), flatten(changes)
    others = ("gpu", "model", "engine", "async_scheduling", "tensor_parallel", "drafter")
    found = sorted({f"cost.{name}" for name in others} & changed.keys())
    measured = [f"cost.{name}" for name in ("drafted_k", "cells") if f"cost.{name}" not in changed]
    measured = [name for name in measured if getattr(system.cost, name.removeprefix("cost."), ())]
    if found and measured:
        fix = f"give {' '.join(f'{name}=[]' for name in measured)}, and host_draft_ms and eager_layer_ms anew or none"
        raise ConfigError([f"{', '.join(found)}: {' and '.join(measured)} was measured with another; {fix}"])
    return system
