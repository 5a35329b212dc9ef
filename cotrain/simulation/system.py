"""SYSTEM.toml: what is simulated and where its constants come from, checked and turned into a scenario."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cotrain.config.errors import ConfigError, validated
from cotrain.config.load import Table, merge, read_tables
from cotrain.run.provenance import flatten
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.roofline import Hardware, Model, Roofline, hardware, model
from cotrain.simulation.scenario import Engines, Ints, Scenario
from cotrain.simulation.step_time import Array, FittedLaw, MeasuredCells, StepTime
from drafters.config import Section

Made = TypeVar("Made")

STEP_TIME_ERRORS = {"measured": 0.03, "fitted": 0.1, "roofline": 0.35, "drafted row": 0.1}
"""Relative error of the step-time ratio where the system states none, by where step times come from: about what
docs/simulator.md finds on measurements that were held out, the last of a roofline that was adjusted to a drafted row."""

OF_A_SYSTEM = {"system.gpu": None, "system.model": None, "system.tensor_parallel": 1, "drafter.kind": "eagle3"}
"""Fields and their defaults. A drafted row says nothing of a system in which one of them is another."""

LEFT_OUT = "left out"
"""How the origin of a field begins that overrides make meaningless."""

ONE_SYSTEM = 'step times were measured on one system (cost.type = "roofline" computes others)'


class EnginesConfig(Section):
    """The rollout engines and what they run on."""

    gpu: str | None = None
    """GPU, by its name in cotrain/simulation/data/hardware.toml; needed by a roofline and by learner.gpus."""
    model: str | None = None
    """Policy, by its name in cotrain/simulation/data/models.toml; needed by a roofline and by learner.gpus."""
    engines: PositiveInt = 1
    """Rollout engines."""
    tensor_parallel: PositiveInt = 1
    """GPUs of an engine."""
    max_num_seqs: PositiveInt = 256
    """Most requests that an engine runs at once; others wait."""
    graph_tokens: PositiveInt | None = None
    """Largest step that has a captured CUDA graph, in tokens: requests times draft length + 1. Default: all steps have one.
    Before its pull request 50488, vLLM had them up to min(2 max_num_seqs, 512) tokens."""
    kv_tokens: PositiveInt | None = None
    """Tokens of context that an engine holds. Default: what fits by a roofline; no limit with measured step times."""
    overhead_seconds: NonNegativeFloat = 0.0
    """Seconds of generation in a step in which no engine works."""


class RooflineCost(Section):
    """Step times from data sheets, shapes, and constants fitted to measured operators."""

    type: Literal["roofline"]
    """Where step times come from."""
    host_step_ms: NonNegativeFloat | None = None
    """What the host adds to each step. Default, as of the next two: what hardware.toml states."""
    host_draft_ms: NonNegativeFloat | None = None
    """What the host adds for each pass of the drafter."""
    eager_step_ms: NonNegativeFloat | None = None
    """Least time of a step that has no captured graph."""
    drafted_k: tuple[PositiveInt, ...] = ()
    """Draft lengths of the steps measured on this very system that these constants were adjusted to. Longer drafts give an
    envelope: for systems that are known, speed-ups came out 35 to 60 % too high without a measured one."""
    error: NonNegativeFloat | None = None
    """Relative standard error of the step-time ratio. Default: 0.1 up to the largest of drafted_k, 0.35 beyond."""


class CellsCost(Section):
    """Measured step times."""

    type: Literal["cells"]
    """Where step times come from."""
    cells: tuple[tuple[NonNegativeInt, PositiveInt, PositiveFloat], ...]
    """[draft length, batch size, milliseconds of a decode step] of each measurement; repeated ones count as their median."""
    law: bool = False
    """Fit a law of five constants to the cells, which prompts then cost by too, in place of interpolating between them."""
    prefill_tokens_per_s: PositiveFloat | None = None
    """Prompt tokens computed a second, between cells. Default: prompts take no time."""
    error: NonNegativeFloat | None = None
    """Relative standard error of the step-time ratio. Default: 0.03 between cells, 0.1 by a law."""


class WorkloadConfig(Section):
    """What a step generates. Lengths are those of `groups`, or log-normal ones."""

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
    """Part of its variance that the samples of a prompt share."""
    limit: PositiveInt = 32768
    """Most tokens of a response."""
    groups: tuple[Annotated[tuple[PositiveInt, ...], Field(min_length=1)], ...] = ()
    """Tokens of real responses, by prompt and step after step, in place of prompts and samples; the limit cuts them too."""
    steps: PositiveInt = 1
    """Steps that are simulated; the answer is their mean."""
    order: Literal["drawn", "longest_first"] = "drawn"
    """Order in which prompts begin."""


class DrafterConfig(Section):
    """Speculation; without this section there is none."""

    kind: Literal["eagle3", "mtp", "history"] = "eagle3"
    """What drafts, for a roofline. history (n-gram, suffix) takes no time of its own and drafts unequal lengths."""
    accept: tuple[float, ...] | None = None
    """Share of drafts of which at least 1, 2, ... tokens are accepted."""
    by_depth: tuple[tuple[NonNegativeInt, tuple[float, ...]], ...] = ()
    """[first token of the response, accept from there on], where acceptance changes within a response."""
    acceptance_length: PositiveFloat | None = None
    """In place of accept: tokens that a verification step emits on average."""
    acceptance_k: PositiveInt | None = None
    """Draft length at which acceptance_length was measured; given with it."""
    k: NonNegativeInt = 3
    """Draft tokens of a request and step; the most of them when adaptive."""
    adaptive: bool = False
    """Do the engines take the draft length from 0 to k with the most tokens a second at each batch size?"""
    error: NonNegativeFloat = 0.03
    """Relative standard error of the acceptance length."""


class LearnerConfig(Section):
    """All that a step does beside generating."""

    seconds: dict[str, NonNegativeFloat] = {}
    """Seconds of its stages, such as prepare, logprob and train."""
    gpus: PositiveInt | None = None
    """GPUs of the learner: logprob and train are computed for system.model where `seconds` lacks them."""
    train_mfu: PositiveFloat = 0.4
    """Share of the GPUs' peak that training reaches."""
    logprob_mfu: PositiveFloat = 0.25
    """Share of the GPUs' peak that log probabilities reach."""
    lag: NonNegativeInt = 0
    """Steps that generation may be ahead of the learner, on machines of its own; 0 is synchronous."""
    sync_seconds: NonNegativeFloat = 0.0
    """Seconds in which the weights are sent."""


class CotrainingConfig(Section):
    """Training of the drafter beside the policy, which gives the acceptance of [drafter]."""

    gain: float
    """Acceptance length above that of a drafter which is not trained, with acceptance_k draft tokens or as many as accept
    has; below 0 where training made it worse."""
    seconds_per_step: NonNegativeFloat
    """Seconds of its training for each step."""
    exposed: bool = False
    """Does the step wait for it?"""


class SystemConfig(Section):
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


@dataclass(frozen=True)
class System:
    config: SystemConfig
    table: Table
    """Fields as they were given."""
    origins: dict[str, str]
    """Where each given field comes from."""

    def constants(self, built: Scenario) -> dict[str, Any]:
        """Every constant with its origin, as plain data; what was not given as it came out in the scenario built of it."""
        fields = flatten(self.config.model_dump(mode="json", exclude={"origins"}))
        found: dict[str, Any] = {n: {"value": v, "origin": self.origins.get(n, "default")} for n, v in fields.items()}
        found["cost.error"]["value"] = built.step_time_error
        found["system.kv_tokens"]["value"] = built.engines.kv_tokens
        if isinstance(built.cost, Roofline):
            found |= {"hardware": asdict(built.cost.hardware), "model": asdict(built.cost.model)}
        return found

    def build(self) -> Scenario:
        """Raises ConfigError listing all that is unknown, does not go together or does not fit."""
        c, problems = self.config, list[str]()

        def tried(field: str, make: Callable[[], Made]) -> Made | None:
            try:
                return make()
            except ValueError as error:
                problems.append(f"{field}: {error}")
                return None

        if isinstance(c.cost, RooflineCost) or c.learner.gpus:
            tried("system.gpu", lambda: self._hardware)
            tried("system.model", lambda: self._model)
        problems += self._without_effect()
        acceptance, groups = tried("drafter", self._acceptance), tried("workload", self._groups)
        if problems or groups is None:
            raise ConfigError(problems)
        sequences = np.concatenate(groups).astype(float) + c.workload.prompt_tokens
        if (built := tried("cost", lambda: self._cost(int(sequences.max())))) is None:
            raise ConfigError(problems)
        (cost, room), training = built, c.cotraining if acceptance else None
        scenario = Scenario(
            cost=cost,
            engines=Engines(c.system.engines, c.system.max_num_seqs, room),
            lengths=groups,
            prompt_tokens=c.workload.prompt_tokens,
            acceptance=acceptance,
            k=c.drafter.k if c.drafter else 0,
            steps=c.workload.steps,
            acceptance_error=c.drafter.error if c.drafter else 0.0,
            order=c.workload.order,
            learner_seconds=self._learner_seconds(sequences),
            generation_overhead=c.system.overhead_seconds,
            lag=c.learner.lag,
            sync_seconds=c.learner.sync_seconds,
            drafter_seconds=training.seconds_per_step if training and training.exposed else 0.0,
            drafted_k=c.cost.drafted_k if isinstance(c.cost, RooflineCost) else (),
        )
        if c.drafter and c.drafter.adaptive:
            scenario = scenario.adaptive(c.drafter.k)
        adjusted = cost.origin == "roofline" and not scenario.envelope
        usual_error = STEP_TIME_ERRORS["drafted row" if adjusted else cost.origin]
        return replace(scenario, step_time_error=usual_error if c.cost.error is None else c.cost.error)

    def _without_effect(self) -> list[str]:
        """A line for each field that is given and would change nothing."""
        c, d, cells = self.config, self.config.drafter, isinstance(self.config.cost, CellsCost)
        by_length = d is not None and d.acceptance_length is not None
        refused = [
            (bool(c.workload.groups), "workload", "prompts samples mean_length sigma group_share", "groups is given"),
            (cells and not c.learner.gpus, "system", "gpu model", ONE_SYSTEM),
            (cells, "system", "tensor_parallel graph_tokens", ONE_SYSTEM),
            (cells, "drafter", "kind", ONE_SYSTEM),
            (getattr(c.cost, "law", False), "cost", "prefill_tokens_per_s", "the law costs prompts too"),
            (not by_length, "drafter", "acceptance_k", "it goes with acceptance_length"),
            (by_length, "drafter", "by_depth", "it goes with accept"),
        ]
        return [
            f"{section}.{name}: it has no effect, since {why}; leave it out, or set it to none"
            for applies, section, names, why in refused
            for name in names.split()
            if applies and (given := getattr(c, section)) and name in given.model_fields_set
            if getattr(given, name) not in (None, ())
        ]

    @property
    def _hardware(self) -> Hardware:
        return hardware(self.config.system.gpu or "(none given)")

    @property
    def _model(self) -> Model:
        return model(self.config.system.model or "(none given)")

    def _groups(self) -> list[list[int]]:
        w = self.config.workload
        if w.groups:
            if len(w.groups) < w.steps:
                raise ValueError(f"{len(w.groups)} groups are too few for {w.steps} steps; lower workload.steps")
            return [[min(length, w.limit) for length in group] for group in w.groups]
        if w.mean_length is None:
            raise ValueError("give mean_length of the responses, or their lengths as groups")
        shape = (w.steps * w.prompts, w.samples, w.mean_length, w.sigma, w.group_share, w.limit)
        return [list(group) for group in lognormal_lengths(*shape, seed=0).tolist()]

    def _acceptance(self) -> Acceptance | None:
        d = self.config.drafter
        if d is None:
            return None
        if d.accept is not None and d.acceptance_length is None:
            found = Acceptance(d.accept, d.by_depth)
        elif d.accept is None and d.acceptance_length and d.acceptance_k:
            found = Acceptance.from_length(d.acceptance_length, d.acceptance_k)
        else:
            raise ValueError("give either accept, or acceptance_length with acceptance_k, at which it was measured")
        most, training = found.length(d.acceptance_k or len(d.accept or ())) - 1, self.config.cotraining
        if training and training.gain > most:
            raise ValueError(f"cotraining.gain {training.gain:g} is more than drafts bring; give at most {most:.3g}")
        return found

    def _cost(self, longest: int) -> tuple[StepTime, int | None]:
        """Step times, and the tokens of context that an engine holds, of which the longest request needs so many."""
        c, cost, d = self.config, self.config.cost, self.config.drafter
        if (room := c.system.kv_tokens) and room < longest:
            raise ValueError(f"system.kv_tokens {room} hold no request of {longest} tokens; lower workload.limit")
        if isinstance(cost, CellsCost):
            cells = {(k, n): median(ms for *at, ms in cost.cells if at == [k, n]) / 1e3 for k, n, _ in cost.cells}
            return FittedLaw.fit(cells) if cost.law else MeasuredCells(cells, cost.prefill_tokens_per_s), room
        times = {"step_s": cost.host_step_ms, "draft_s": cost.host_draft_ms, "eager_layer_s": cost.eager_step_ms}
        given: dict[str, Any] = {name: ms / 1e3 for name, ms in times.items() if ms is not None}
        if "eager_layer_s" in given:
            given["eager_layer_s"] /= self._model.layers
        history = d is not None and d.kind == "history"
        host = replace(self._hardware.host, graph_tokens=c.system.graph_tokens, non_uniform=history, **given)
        shape = None if d is None or d.kind == "history" else self._model.drafter(d.kind)
        roofline = Roofline(replace(self._hardware, host=host), self._model, c.system.tensor_parallel, shape)
        if (held := roofline.kv_tokens(longest)) < (room or 0):
            raise ValueError(f"system.kv_tokens {room} are more than the {held} that an engine's GPUs hold; lower it")
        return roofline, room or held

    def _learner_seconds(self, sequences: Array) -> dict[str, float]:
        n = self.config.learner
        if not n.gpus:
            return n.seconds
        forward = self._model.forward_flops(sequences) / self.config.workload.steps
        seconds = forward / (self._hardware.flops["bf16"] * n.gpus)
        return {"logprob": seconds / n.logprob_mfu, "train": 3 * seconds / n.train_mfu} | n.seconds


def lognormal_lengths(
    prompts: int, samples: int, mean: float, sigma: float, group_share: float, limit: int, seed: int
) -> Ints:
    """[prompts, samples] tokens, 1 to limit.

    mean: before the limit cuts. sigma: standard deviation of log length; group_share: part of its square that is the same for
    all samples of a prompt, 0 to 1.
    """
    rng = np.random.default_rng(seed)
    shared, own = rng.standard_normal((prompts, 1)), rng.standard_normal((prompts, samples))
    logs = np.sqrt(group_share) * shared + np.sqrt(1 - group_share) * own
    return np.clip(np.rint(mean * np.exp(sigma * logs - sigma**2 / 2)), 1, limit).astype(np.int64)


def load_system(path: str | Path, overrides: Sequence[str] = ()) -> System:
    """A SYSTEM.toml with key=value over it. Raises ConfigError listing all problems."""
    return parse_system(read_tables([path], [])[0], overrides, str(path))


def parse_system(table: Table, overrides: Sequence[str] = (), origin: str = "given") -> System:
    """Fields with key=value over them; `origins` may tell more of where they come from. Raises ConfigError as load_system.

    Overrides that make it another system leave out what was fitted to its drafted rows, unless they give drafted_k anew; those
    with another acceptance leave out that by depth. The origin of such a field says so.
    """
    changes: Table = reduce(merge, read_tables([], overrides), {})
    before, after, left = flatten(table), flatten(changes), dict[str, str]()
    another = any(name in after and after[name] != before.get(name, usual) for name, usual in OF_A_SYSTEM.items())
    if another and "cost.drafted_k" in before and "cost.drafted_k" not in after:
        fitted = ("cost.drafted_k", "cost.host_draft_ms", "cost.eager_step_ms")
        left |= dict.fromkeys(fitted, f"{LEFT_OUT}, since it was measured on another system")
    if "drafter.accept" in after:
        left["drafter.by_depth"] = f"{LEFT_OUT}, since drafter.accept is given anew"
    left = {name: why for name, why in left.items() if name in before and name not in after}
    for section, _, field in (name.partition(".") for name in left):
        table = table | {section: {name: value for name, value in table[section].items() if name != field}}
    given = merge(table, changes)
    config = validated(SystemConfig, given)
    told = dict.fromkeys(before, origin)
    for name in sorted(config.origins):  # so that the longest that holds for a field is the last
        told |= dict.fromkeys((field for field in before if f"{field}.".startswith(f"{name}.")), config.origins[name])
    return System(config, given, config.origins | told | dict.fromkeys(after, "command line") | left)
