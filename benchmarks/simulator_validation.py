"""What the simulator predicts of measurements that others published, and of this project's CPU machine.

All measurements are in cotrain/simulation/data, each with its source. benchmarks/simulator_table.py prints the predictions,
and tests/cotrain/simulation holds them to their bounds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.simulator_calibration import fit_host, solve
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.roofline import Roofline, hardware, model, tables
from cotrain.simulation.scenario import Engines, Scenario, generate, schedule
from cotrain.simulation.step_time import MeasuredCells, StepTime
from cotrain.simulation.system import WorkloadConfig

FITTED_TO, LEFT_GRAPHS = ("zero", 0), ("zero", 4)
"""Rows that constants are fitted to: k = 3 and k = 5 of the same drafter."""

LEVELS = ("no drafted row", "one drafted row", "and graphs of 128 tokens", "two drafted rows")


@dataclass(frozen=True)
class Assumption:
    """What was not published of the paper's system. Engines: 32."""

    requests: int
    """Requests of an engine."""
    limit: int
    step_s: float
    """Host seconds of a step."""


OTHERS = (
    Assumption(8, 32768, 0.5e-3),
    Assumption(16, 32768, 2.6e-3),
    Assumption(32, 16384, 0.5e-3),
    Assumption(32, 16384, 2.6e-3),
    Assumption(64, 16384, 1.2e-3),
)
"""Workloads that meet the rows without speculation as well as that of paper.toml."""


@dataclass(frozen=True)
class Row:
    run: str
    drafter: str
    k: int
    length: float
    speedup: float

    @property
    def is_eagle(self) -> bool:
        return self.drafter != "n-gram"


def rows() -> dict[tuple[str, int], Row]:
    """By run and place."""
    measured = tables("paper")["rows"]
    return {(run, i): Row(run, *row) for run in measured for i, row in enumerate(measured[run]["measured"])}


class Published:
    """The 8B system of the paper, with lengths for which generation without speculation takes as long as it did."""

    def __init__(self, changes: dict[str, Any]):
        self._assumed = {**tables("paper")["workload"], "step_s": hardware("h100-sxm").host.step_s} | changes
        policy, gpu = model("Qwen3-8B"), hardware("gb200")
        host = replace(hardware("h100-sxm").host, step_s=self._assumed["step_s"], eager_layer_s=gpu.host.eager_layer_s)
        self.undrafted = Roofline(replace(gpu, host=host), policy, 1, policy.drafter())
        self.mean_lengths = {run: self._mean_length(run) for run in ("zero", "think")}
        self._draws = {run: self._drawn(mean) for run, mean in self.mean_lengths.items()}
        self._plain = {run: self._seconds(self.undrafted, draws) for run, draws in self._draws.items()}

    def _drawn(self, mean: float) -> list[list[list[int]]]:
        names = ("prompts", "samples", "sigma", "group_share", "limit")
        workload = WorkloadConfig(mean_length=mean, **{name: self._assumed[name] for name in names})
        return [workload.lengths(seed) for seed in range(self._assumed["draws"])]

    def _seconds(self, cost: StepTime, draws: list[list[list[int]]], k: int = 0, length: float = 1.0) -> float:
        acceptance = Acceptance.from_length(length, k) if k else None
        a = self._assumed
        engines = Engines(a["engines"], a["prompts"] * a["samples"])
        arms = (Scenario(cost, engines, draw, a["prompt_tokens"], acceptance, k) for draw in draws)
        return fmean(generate(arm).seconds for arm in arms)

    def _mean_length(self, run: str) -> float:
        measured = tables("paper")["stages"][run]["plain"]["generation"]
        limit = self._assumed["limit"]
        return solve(
            "mean length",
            lambda mean: self._seconds(self.undrafted, self._drawn(mean)),
            measured,
            limit / 64,
            4 * limit,
        )

    def speedup(self, cost: StepTime, row: Row) -> float:
        """The speed-up of generation."""
        if isinstance(cost, Roofline) and not row.is_eagle:
            host = replace(cost.host, non_uniform=cost.host.graph_tokens is not None)
            cost = replace(cost, hardware=replace(cost.hardware, host=host), drafter=None)
        return self._plain[row.run] / self._seconds(cost, self._draws[row.run], row.k, row.length)

    def fitted(self, cost: Roofline, constant: str, row: Row) -> Roofline:
        return fit_host(cost, constant, lambda changed: self.speedup(changed, row), row.speedup)

    def levels(self, most: int = len(LEVELS)) -> list[Roofline]:
        """Step times as more of the measured rows are used, in the order of LEVELS."""
        costs = [self.undrafted]
        if most > 1:
            costs.append(self.fitted(self.undrafted, "draft_s", rows()[FITTED_TO]))
        if most > 2:
            captured = replace(costs[1].host, graph_tokens=self._assumed["graph_tokens"])
            costs.append(replace(costs[1], hardware=replace(costs[1].hardware, host=captured)))
            costs.append(self.fitted(costs[2], "eager_layer_s", rows()[LEFT_GRAPHS]))
        return costs

    def step_errors(self, cost: StepTime) -> list[float]:
        """Relative error of the step's speed-up with k = 3, for each run."""
        errors = []
        for run, stages in tables("paper")["stages"].items():
            seconds = stages["plain"]
            rest = sum(seconds.values()) - seconds["generation"]
            spent = seconds["generation"] / self.speedup(cost, rows()[run, 0])
            errors.append(sum(seconds.values()) / (spent + rest) / stages["step_speedup"] - 1)
        return errors


@dataclass(frozen=True)
class Prediction:
    costs: list[Roofline]
    mean_lengths: dict[str, float]
    speedups: list[dict[tuple[str, int], float]]
    """By level, then by row."""
    steps: list[list[float]]
    """Relative errors of the steps, by level."""

    def errors(self, level: int, only: Iterable[tuple[str, int]] | None = None) -> dict[tuple[str, int], float]:
        """Relative, of the rows that the level was not fitted to."""
        used = [set(), {FITTED_TO}, {FITTED_TO}, {FITTED_TO, LEFT_GRAPHS}][level]
        wanted = set(self.speedups[level] if only is None else only) - used
        return {key: self.speedups[level][key] / row.speedup - 1 for key, row in rows().items() if key in wanted}


@cache
def prediction(assumption: Assumption | None = None, draws: int | None = None) -> Prediction:
    """Of the paper's rows, with the workload of paper.toml; of those with k = 3 up to one drafted row, with another."""
    changes: dict[str, Any] = {"draws": draws} if draws else {}
    if assumption:
        samples = min(16, assumption.requests)
        prompts = tables("paper")["workload"]["engines"] * assumption.requests // samples
        changes = {"prompts": prompts, "samples": samples, "draws": 1}
        changes |= {"limit": assumption.limit, "step_s": assumption.step_s}
    published = Published(changes)
    costs = published.levels(2 if assumption else len(LEVELS))
    wanted = short_drafts() if assumption else set(rows())
    speedups = [{key: published.speedup(cost, row) for key, row in rows().items() if key in wanted} for cost in costs]
    return Prediction(costs, published.mean_lengths, speedups, [published.step_errors(cost) for cost in costs])


def workloads() -> list[tuple[Assumption, Prediction]]:
    """That of paper.toml first."""
    w = tables("paper")["workload"]
    own = Assumption(w["prompts"] * w["samples"] // w["engines"], w["limit"], hardware("h100-sxm").host.step_s)
    return [(own, prediction()), *((other, prediction(other)) for other in OTHERS)]


def short_drafts() -> set[tuple[str, int]]:
    """The rows of k = 3 with an EAGLE-3 drafter."""
    return {key for key, row in rows().items() if row.k == 3 and row.is_eagle}


def long_drafts() -> set[tuple[str, int]]:
    return {key for key, row in rows().items() if row.k > 3}


def amdahl() -> list[tuple[str, float, float]]:
    """Name, and predicted and measured speed-up of a step, from the measured generation times alone."""
    found = []
    for run, stages in tables("paper")["stages"].items():
        whole, spent = sum(stages["plain"].values()), stages["plain"]["generation"]
        found.append(
            (f"RL-{run.title()}", whole / (whole - spent + stages["speculating"]["generation"]), stages["step_speedup"])
        )
    for name, share, generation, step in tables("paper")["amdahl"]["rows"]:
        found.append((name, step_of(share, generation), step))
    return found


def asynchronous() -> tuple[float, float]:
    """Predicted and measured seconds of a step with lag 1 and speculation: the synchronous speed-up, the same learner."""
    measured = tables("paper")["asynchronous"]
    plain = measured["plain"]
    learning = plain["step"] - plain["exposed_generation"]
    generation = plain["step"] / rows()["think", 0].speedup
    steps = schedule(np.full(32, generation), np.full(32, learning), measured["lag"])
    return steps.step_seconds, measured["speculating"]["step"]


HOSTS = {"no host time": (0.0, 0.0), "host of the H100": (1.2e-3, 0.4e-3), "host fitted at 8B": (1.2e-3, 1.56e-3)}
"""Host seconds of a step and a draft pass."""


def step_of(share: float, generation: float) -> float:
    return 1 / (share / generation + 1 - share)


def law_of_projection() -> list[tuple[float, float]]:
    """Speed-ups of generation and step of the paper's cells, by the two constants that reproduce them."""
    p = tables("paper")["projection"]
    speedups = [length / (1 + p["overhead_per_draft_token"] * k) for k, length, *_ in p["cells"]]
    return [(speedup, step_of(p["generation_share"], speedup)) for speedup in speedups]


@cache
def own_projection() -> dict[str, list[tuple[float, float]]]:
    """Those of the same cells by the roofline, for each assumption on the host."""
    p = tables("paper")["projection"]
    a, policy, gpu = p["assumed"], model(p["model"]), hardware("gb200")
    engines = Engines(p["gpus"] // a["tensor_parallel"], p["requests"])
    lognormal = {"mean_length": a["mean"], "sigma": a["sigma"], "limit": a["limit"]}
    lengths = WorkloadConfig(prompts=p["requests"] // 16, samples=16, **lognormal).lengths()
    found = {}
    for name, (step_s, draft_s) in HOSTS.items():
        host = replace(gpu.host, step_s=step_s, draft_s=draft_s)
        cost = Roofline(replace(gpu, host=host), policy, a["tensor_parallel"], policy.drafter())
        cost.kv_tokens(a["prompt_tokens"] + a["limit"])

        def seconds(k: int = 0, length: float = 1.0, cost: Roofline = cost) -> float:
            acceptance = Acceptance.from_length(length, k) if k else None
            return generate(Scenario(cost, engines, lengths, a["prompt_tokens"], acceptance, k)).seconds

        plain = seconds()
        speedups = [plain / seconds(k, length) for k, length, *_ in p["cells"]]
        found[name] = [(speedup, step_of(p["generation_share"], speedup)) for speedup in speedups]
    return found


def surface_errors() -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of the roofline on SpecDecode-Bench's H100 surface: of steps, and of the ratio to one with k = 0."""
    data = tables("h100_surface")
    law, batch = data["law"], np.array(data["compared"]["batch"], float)
    policy = model(law["model"])
    cost = Roofline(hardware(law["gpu"]), policy, 1, policy.drafter())

    def measured(k: int, tokens: np.ndarray) -> np.ndarray:
        seconds = law["fixed"] + law["step_overhead"] + law["row"] * batch * (k + 1) + law["context"] * tokens
        drafting = law["draft_fixed"] + law["draft_row"] * (k + 1) + law["draft_context"] * tokens
        return seconds + (drafting if k else 0.0)

    steps, ratios = [], []
    for context in data["compared"]["context"]:
        tokens = batch * context
        errors = [(cost.base(k, batch) + cost.slope(k) * tokens) / measured(k, tokens) for k in data["compared"]["k"]]
        steps += errors
        ratios += [error / errors[0] for error in errors[1:]]
    return np.concatenate(steps) - 1, np.concatenate(ratios) - 1


def single_step() -> tuple[float, float]:
    """Predicted and measured seconds of a step of Qwen3-32B on two H100."""
    data = tables("h100_surface")["single"]
    cost = Roofline(hardware(data["gpu"]), model(data["model"]), data["tensor_parallel"])
    batch = data["batch"]
    return float(cost.base(0, np.array([float(batch)]))[0] + cost.slope(0) * batch * data["context"]), data["seconds"]


def cpu_cells(session: str, drafter: str) -> dict[tuple[int, int], float]:
    """Seconds of steps that the measured speeds of a full batch mean."""
    data = tables("cpu")
    without = dict(zip(data["seconds"]["batch"], data["seconds"]["without"], strict=True))
    cells = {(0, batch): seconds for batch, seconds in without.items()}
    for k, (length, speeds) in enumerate(
        zip(data["acceptance"][drafter], data[session]["speed"][drafter], strict=True), 1
    ):
        cells |= {(k, batch): without[batch] * length / speed for batch, speed in zip(without, speeds, strict=True)}
    return cells


@dataclass(frozen=True)
class Drain:
    session: str
    drafter: str
    k: int
    predicted: float
    measured: float
    standard_error: float

    @property
    def is_close(self) -> bool:
        """Within 5 % or two standard errors."""
        return abs(self.predicted - self.measured) <= max(0.05 * self.measured, 2 * self.standard_error)


@cache
def drains() -> list[Drain]:
    """Speed of a batch that drains from 16 requests to 1, predicted from full batches: the speed-up of its generation."""
    found, data = [], tables("cpu")
    for session in ("earlier", "later"):
        for drafter, measured in data[session]["drain"].items():
            cost = MeasuredCells(cpu_cells(session, drafter))
            for k, (speed, error) in enumerate(zip(measured, data[session]["drain_error"][drafter], strict=True), 1):
                acceptance = Acceptance.from_length(data["acceptance"][drafter][k - 1], k)
                batch = Scenario(cost, Engines(1, 16), [[4 * i] for i in range(1, 17)], 0, acceptance, k)
                predicted = generate(batch.without_speculation()).seconds / generate(batch).seconds
                found.append(Drain(session, drafter, k, predicted, speed, error))
    return found


def size(errors: Iterable[float]) -> tuple[float, float]:
    """Mean and largest absolute value."""
    absolute = np.abs(list(errors))
    return float(absolute.mean()), float(absolute.max())
