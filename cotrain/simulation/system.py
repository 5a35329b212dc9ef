"""The schema of SYSTEM.toml: what is simulated and where its constants come from. It is checked and turned into a scenario."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cotrain.config.errors import together, validated
from cotrain.config.load import Table, merge, read_tables
from cotrain.run.provenance import flatten
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.roofline import Roofline, hardware, model
from cotrain.simulation.scenario import Engines, Scenario
from cotrain.simulation.step_time import Array, MeasuredCells, StepTime
from drafters.config import Section

STEP_TIME_ERRORS = {"measured": 0.03, "roofline": 0.1}
"""Default relative error of the step-time ratio, by the origin of the step times: about what docs/simulator.md finds on held-out
measurements."""

OF_A_SYSTEM = {"cost.gpu": None, "cost.model": None, "cost.tensor_parallel": 1, "cost.drafter": "eagle3"}
"""Fields, with defaults, that a step measured with drafts depends on. If one of them changes, the measurement no longer holds."""

MEASURED_WITH = {name: set(OF_A_SYSTEM) for name in ("cost.drafted_k", "cost.host_draft_ms", "cost.eager_layer_ms")}
MEASURED_WITH |= {"drafter.by_depth": {"drafter.accept"}}
"""Field -> fields with which it was measured. If overrides change one of those, the field is left out unless they give it too."""

LEFT_OUT = "left out"
"""Start of the origin text of a field that was left out in this way."""

LOGNORMAL = {"prompts", "samples", "mean_length", "sigma", "group_share"}
"""Fields of the workload that describe randomly drawn response lengths."""


class EnginesConfig(Section):
    """The rollout engines."""

    engines: PositiveInt = 1
    """Rollout engines."""
    max_num_seqs: PositiveInt = 256
    """Most requests that an engine runs at once; others wait."""
    kv_tokens: PositiveInt | None = None
    """Tokens of context that fit into an engine. Default: computed with a roofline; no limit with measured step times."""
    overhead_seconds: NonNegativeFloat = 0.0
    """Seconds of a step's generation during which no engine works."""


class RooflineCost(Section):
    """Step times from data sheets, shapes, and constants fitted to measured operators."""

    type: Literal["roofline"]
    """Where step times come from."""
    gpu: str
    """GPU, by its name in cotrain/simulation/data/hardware.toml."""
    model: str
    """Policy: its name or hub id in cotrain/simulation/data/models.toml, or the path of any model's config.json."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    drafter: Literal["eagle3", "mtp", "history"] = "eagle3"
    """Kind of drafter, given a [drafter]. history (n-gram, suffix) takes no time, and its draft lengths differ by request."""
    graph_tokens: PositiveInt | None = None
    """Largest step with a captured CUDA graph, in tokens: requests times (draft length + 1). Default: all steps have one.
    Before its pull request 50488, vLLM captured graphs of up to min(2 max_num_seqs, 512) tokens."""
    host_step_ms: NonNegativeFloat | None = None
    """Time that the host adds to each step. Default of this and the next two fields: the value in hardware.toml."""
    host_draft_ms: NonNegativeFloat | None = None
    """Time that the host adds for each pass of the drafter."""
    eager_layer_ms: NonNegativeFloat | None = None
    """Least time of each layer of the policy in a step without a captured graph."""
    drafted_k: tuple[PositiveInt, ...] = ()
    """Draft lengths of steps measured on this very system, to which these constants were adjusted. Longer drafts give only an
    envelope: without a measured step, predicted speed-ups of known systems were 30 to 200 % too high."""
    error: NonNegativeFloat = STEP_TIME_ERRORS["roofline"]
    """Relative standard error of the step-time ratio. The interval of an envelope also has how much too high it may be."""


class CellsCost(Section):
    """Measured step times."""

    type: Literal["cells"]
    """Where step times come from."""
    cells: tuple[tuple[NonNegativeInt, PositiveInt, PositiveFloat], ...]
    """[draft length, batch size, milliseconds of a decode step] of each measurement; repeated ones count as their median."""
    prefill_tokens_per_s: PositiveFloat | None = None
    """Prompt tokens computed per second. Default: prompts take no time."""
    error: NonNegativeFloat | None = None
    """Relative standard error of the step-time ratio. Default: 0.03."""


class WorkloadConfig(Section):
    """What a step generates. Response lengths are given in `groups`, or drawn from a log-normal distribution."""

    prompts: PositiveInt = 64
    """Prompts of a step."""
    samples: PositiveInt = 16
    """Responses to a prompt."""
    prompt_tokens: NonNegativeInt = 200
    """Tokens of a prompt."""
    mean_length: PositiveFloat | None = None
    """Mean tokens of a response before the limit cuts it."""
    sigma: NonNegativeFloat = 1.0
    """Standard deviation of the logarithm of a length."""
    group_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the variance of that logarithm that is common to all samples of a prompt."""
    limit: PositiveInt = 32768
    """Most tokens of a response."""
    groups: tuple[Annotated[tuple[PositiveInt, ...], Field(min_length=1)], ...] = ()
    """Tokens of real responses, a list per prompt, step after step. They replace prompts and samples; the limit cuts them too."""
    steps: PositiveInt = 1
    """Steps that are simulated; the answer is their mean."""

    def lengths(self, seed: int = 0) -> list[list[int]]:
        """Return the tokens of the responses to each prompt, step after step. The seed is for lengths that are drawn.

        Raises ValueError for fields that do not go together.
        """
        if self.groups:
            if given := self.model_dump(include=LOGNORMAL, exclude_unset=True, exclude_none=True):
                raise ValueError(f"workload.groups: {', '.join(given)} would have no effect beside it; leave that out")
            if len(self.groups) < self.steps:
                raise ValueError(f"workload.steps: {len(self.groups)} groups are too few for {self.steps}; lower it")
            return [[min(length, self.limit) for length in group] for group in self.groups]
        if self.mean_length is None:
            raise ValueError("workload.mean_length: give it, or the lengths of responses as workload.groups")
        rng, prompts = np.random.default_rng(seed), self.steps * self.prompts
        shared, own = rng.standard_normal((prompts, 1)), rng.standard_normal((prompts, self.samples))
        logs = self.sigma * (np.sqrt(self.group_share) * shared + np.sqrt(1 - self.group_share) * own)
        drawn = np.rint(self.mean_length * np.exp(logs - self.sigma**2 / 2))
        return np.clip(drawn, 1, self.limit).astype(int).tolist()


class DrafterConfig(Section):
    """Speculation; without this section there is none."""

    accept: tuple[float, ...] | None = None
    """Share of drafts of which at least 1, 2, ... tokens are accepted."""
    by_depth: tuple[tuple[NonNegativeInt, tuple[float, ...]], ...] = ()
    """[first response token, accept from that token on], if acceptance changes within a response."""
    acceptance_length: PositiveFloat | None = None
    """In place of accept: tokens that a verification step emits on average."""
    acceptance_k: PositiveInt | None = None
    """Draft length at which acceptance_length was measured; given with it."""
    k: NonNegativeInt = 3
    """Draft tokens per request and step; the largest number when adaptive."""
    adaptive: bool = False
    """At each batch size, do the engines use the draft length from 0 to k that gives the most tokens per second?"""
    error: NonNegativeFloat = 0.03
    """Relative standard error of the acceptance length."""

    def acceptance(self) -> Acceptance:
        """Return the acceptance of drafts. Raises ValueError for impossible values, and unless it is given in exactly one way."""
        if self.accept is not None and self.acceptance_length is None and self.acceptance_k is None:
            return Acceptance(self.accept, self.by_depth)
        if self.accept is None and not self.by_depth and self.acceptance_length and self.acceptance_k:
            return Acceptance.from_length(self.acceptance_length, self.acceptance_k)
        line = "or acceptance_length with acceptance_k, at which it was measured"
        raise ValueError(f"drafter: give either accept, and by_depth where it changes, {line}")


class LearnerConfig(Section):
    """Everything in a step besides generation."""

    seconds: dict[str, NonNegativeFloat] = {}
    """Seconds of each stage, such as prepare, logprob, train and sending the weights."""
    gpus: PositiveInt | None = None
    """GPUs of the learner. If given, logprob and train are computed for a roofline's GPU and model where `seconds` lacks them."""
    train_mfu: PositiveFloat = 0.4
    """Share of the GPUs' peak that training reaches."""
    logprob_mfu: PositiveFloat = 0.25
    """Share of the GPUs' peak that log probabilities reach."""
    lag: NonNegativeInt = 0
    """Steps that generation may run ahead of the learner, on separate machines; 0 is synchronous."""


class CotrainingConfig(Section):
    """Training of the drafter beside the policy. The acceptance in [drafter] is the one that this training has reached."""

    gain: float
    """How much longer the acceptance length is than without training, with acceptance_k draft tokens or as many as accept has;
    below 0 if training made it worse."""
    seconds_per_step: NonNegativeFloat
    """Seconds of drafter training per step."""
    exposed: bool = False
    """Does the step wait for it?"""


class System(Section):
    """A system to simulate."""

    system: EnginesConfig = EnginesConfig()
    cost: Annotated[RooflineCost | CellsCost, Field(discriminator="type")]
    """Step times: a section [cost] with type = "roofline" or "cells"."""
    workload: WorkloadConfig
    """What a step generates: a section [workload] with mean_length or groups."""
    drafter: DrafterConfig | None = None
    learner: LearnerConfig = LearnerConfig()
    cotraining: CotrainingConfig | None = None
    origins: dict[str, str] = {}
    """Where a value comes from, by "section.field"; it is kept with the answer."""

    @property
    def given(self) -> Table:
        """Only the fields that were given, as plain data."""
        return self.model_dump(mode="json", exclude_unset=True)

    def constants(self, built: Scenario) -> dict[str, Any]:
        """Return every constant with its origin, as plain data. Those not given come from `built`, the scenario built of this."""
        fields = flatten(self.model_dump(mode="json", exclude={"origins"}))
        found: dict[str, Any] = {n: {"value": v, "origin": self.origins.get(n, "default")} for n, v in fields.items()}
        found["cost.error"]["value"] = built.step_time_error
        found["system.kv_tokens"]["value"] = built.engines.kv_tokens
        if isinstance(built.cost, Roofline):
            found |= {"hardware": asdict(built.cost.hardware), "model": asdict(built.cost.model)}
        return found

    def build(self) -> Scenario:
        """Build the scenario. Raises ConfigError listing unknown names, fields that contradict each other, and what does not fit."""
        acceptance, lengths, *_ = together(
            lambda: self.drafter.acceptance() if self.drafter else None, self.workload.lengths, lambda: self._cost(1)
        )
        training = self.cotraining if acceptance else None
        if acceptance and training and training.gain > (most := acceptance.length() - 1):
            raise ValueError(f"cotraining.gain: {training.gain:g} is more than drafts bring; give at most {most:.3g}")
        sequences = np.concatenate(lengths).astype(float) + self.workload.prompt_tokens
        (cost, room), learner_seconds = together(
            lambda: self._cost(int(sequences.max())), lambda: self._learner_seconds(sequences)
        )
        scenario = Scenario(
            cost=cost,
            engines=Engines(self.system.engines, self.system.max_num_seqs, room),
            lengths=lengths,
            prompt_tokens=self.workload.prompt_tokens,
            acceptance=acceptance,
            k=self.drafter.k if self.drafter else 0,
            steps=self.workload.steps,
            acceptance_error=self.drafter.error if self.drafter else 0.0,
            learner_seconds=learner_seconds,
            generation_overhead=self.system.overhead_seconds,
            lag=self.learner.lag,
            drafter_seconds=training.seconds_per_step if training and training.exposed else 0.0,
            drafted_k=self.cost.drafted_k if isinstance(self.cost, RooflineCost) else (),
        )
        if self.drafter and self.drafter.adaptive:
            scenario = scenario.adaptive(self.drafter.k)
        usual_error = STEP_TIME_ERRORS[cost.origin]
        return replace(scenario, step_time_error=usual_error if self.cost.error is None else self.cost.error)

    def _cost(self, longest: int) -> tuple[StepTime, int | None]:
        """Return the step times, and the tokens of context that an engine holds; `longest` is what the longest request needs."""
        cost = self.cost
        if (room := self.system.kv_tokens) and room < longest:
            raise ValueError(f"system.kv_tokens: {room} hold no request of {longest} tokens; lower workload.limit")
        if isinstance(cost, CellsCost):
            cells = {(k, n): median(ms for *at, ms in cost.cells if at == [k, n]) / 1e3 for k, n, _ in cost.cells}
            return MeasuredCells(cells, cost.prefill_tokens_per_s), room
        gpu, policy = together(lambda: hardware(cost.gpu), lambda: model(cost.model))
        times = {"step_s": cost.host_step_ms, "draft_s": cost.host_draft_ms, "eager_layer_s": cost.eager_layer_ms}
        given: dict[str, Any] = {name: ms / 1e3 for name, ms in times.items() if ms is not None}
        host = replace(gpu.host, graph_tokens=cost.graph_tokens, non_uniform=cost.drafter == "history", **given)
        shape = policy.drafter(cost.drafter) if self.drafter and cost.drafter != "history" else None
        roofline = Roofline(replace(gpu, host=host), policy, cost.tensor_parallel, shape)
        if (held := roofline.kv_tokens(longest)) < (room or 0):
            raise ValueError(f"system.kv_tokens: {room} are more than the {held} that an engine's GPUs hold; lower it")
        return roofline, room or held

    def _learner_seconds(self, sequences: Array) -> dict[str, float]:
        n, cost = self.learner, self.cost
        if not n.gpus:
            return n.seconds
        if isinstance(cost, CellsCost):
            raise ValueError('learner.gpus: it needs the GPU of cost.type = "roofline"; give learner.seconds instead')
        forward = model(cost.model).forward_flops(sequences) / self.workload.steps
        seconds = forward / (hardware(cost.gpu).flops["bf16"] * n.gpus)
        return {"logprob": seconds / n.logprob_mfu, "train": 3 * seconds / n.train_mfu} | n.seconds


def load_system(path: str | Path, overrides: Sequence[str] = ()) -> System:
    """Load a SYSTEM.toml and apply key=value overrides. Raises ConfigError listing all problems."""
    return parse_system(read_tables([path], [])[0], overrides, str(path))


def parse_system(table: Table, overrides: Sequence[str] = (), origin: str = "given") -> System:
    """Build a system from a table and key=value overrides. Raises ConfigError listing all problems.

    `origin` is for fields missing in the table's `origins`. What was measured with a changed field is left out (MEASURED_WITH).
    """
    changes: Table = reduce(merge, read_tables([], overrides), {})
    before, after = flatten(table), flatten(changes)
    changed = {name for name in after if after[name] != before.get(name, OF_A_SYSTEM.get(name))}
    left = {
        field: f"{LEFT_OUT}, since it was measured with another {', '.join(sorted(changed & others))}"
        for field, others in MEASURED_WITH.items()
        if field in before and field not in after and changed & others
    }
    for section, _, field in (name.partition(".") for name in left):
        table = table | {section: {name: value for name, value in table[section].items() if name != field}}
    system = validated(System, merge(table, changes))
    told = dict.fromkeys(before, origin)
    for name in sorted(system.origins):  # the most specific name that covers a field comes last, and wins
        told |= dict.fromkeys((field for field in before if f"{field}.".startswith(f"{name}.")), system.origins[name])
    return system.model_copy(update={"origins": system.origins | told | dict.fromkeys(after, "command line") | left})
