"""What the simulator predicts of measurements that others published, and of this project's CPU machine.

    python -m benchmarks.simulator_validation     # writes the table of docs/measurements/simulator.md

All measurements are in benchmarks/simulator, each with its source. tests/cotrain/simulation/test_validation.py holds the
predictions to their bounds.
"""

import tomllib
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import RooflineCost, System, WorkloadConfig

PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "simulator.md"
BEGIN, END = "<!-- table: python -m benchmarks.simulator_validation -->", "<!-- end of table -->"

LEVELS = ("no drafted row", "one drafted row", "and graphs of 128 tokens", "two drafted rows")
RULE = "rule of one line"
FITTED_TO, LEFT_GRAPHS = ("zero", 0), ("zero", 4)
"""Rows that constants are fitted to: k = 3 and k = 5 of the same drafter."""


class Assumption(NamedTuple):
    """What was not published of the paper's system of 32 engines. graph_tokens: min(2 max_num_seqs, 512) of vLLM at the time."""

    requests: int = 32
    limit: int = 16384
    host_step_ms: float = 1.2
    draws: int = 4


OTHERS = [(8, 32768, 0.5), (16, 32768, 2.6), (32, 16384, 0.5), (32, 16384, 2.6), (64, 16384, 1.2)]
"""Requests, limit and host_step_ms of workloads that meet the rows without speculation as well."""


class Row(NamedTuple):
    run: str
    drafter: str
    k: int
    length: float
    speedup: float


@cache
def data(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "simulator" / f"{name}.toml").read_text(encoding="utf-8"))


def rows() -> dict[tuple[str, int], Row]:
    """By run and place."""
    measured = data("paper")["rows"]
    return {(run, i): Row(run, *row) for run in measured for i, row in enumerate(measured[run]["measured"])}


def short_drafts() -> set[tuple[str, int]]:
    return {key for key, row in rows().items() if row.k == 3}


def long_drafts() -> set[tuple[str, int]]:
    return {key for key, row in rows().items() if row.k > 3}


def rule_errors(only: Iterable[tuple[str, int]] | None = None) -> dict[tuple[str, int], float]:
    """Relative errors of: the speed-up is proportional to the acceptance length, through the row that one constant is fitted to."""
    wanted, per_token = (
        set(rows() if only is None else only) - {FITTED_TO},
        rows()[FITTED_TO].speedup / rows()[FITTED_TO].length,
    )
    return {key: per_token * row.length / row.speedup - 1 for key, row in rows().items() if key in wanted}


class Prediction:
    """Of the paper's rows. Mean lengths are such that generation without speculation takes as long as it did."""

    def __init__(self, assumed: Assumption):
        self._assumed = assumed
        host = {"host_step_ms": assumed.host_step_ms, "host_draft_ms": 0.4}  # of the H100 surface
        self._base = {"async_scheduling": "never"} | host
        stages = data("paper")["stages"]
        self._groups = {run: self._lengths(run, stages[run]["plain"]["generation"]) for run in stages}

    @cached_property
    def costs(self) -> list[dict[str, Any]]:
        """Fields of the roofline, by level."""
        one = self._base | {"host_draft_ms": self._fitted("host_draft_ms", FITTED_TO, self._base)}
        graphs = one | {"graph_tokens": 128}
        levels = [self._base, one, graphs]
        if self._assumed == Assumption():
            levels.append(graphs | {"eager_layer_ms": self._fitted("eager_layer_ms", LEFT_GRAPHS, graphs)})
        return levels

    def speedup(self, row: Row, cost: dict[str, Any]) -> float:
        scenario = self._scenario(self._groups[row.run], cost, row)
        return scenario.speedup

    def errors(self, level: int, only: Iterable[tuple[str, int]] | None = None) -> dict[tuple[str, int], float]:
        """Relative, of the rows that the level was not fitted to."""
        used = [set(), {FITTED_TO}, {FITTED_TO}, {FITTED_TO, LEFT_GRAPHS}][level]
        wanted = set(rows() if only is None else only) - used
        return {
            key: self.speedup(row, self.costs[level]) / row.speedup - 1 for key, row in rows().items() if key in wanted
        }

    def step_errors(self, level: int) -> list[float]:
        """Relative error of the step's speed-up with k = 3, for each run."""
        errors = []
        for run, stages in data("paper")["stages"].items():
            share = stages["plain"]["generation"] / sum(stages["plain"].values())
            errors.append(step_of(share, self.speedup(rows()[run, 0], self.costs[level])) / stages["step_speedup"] - 1)
        return errors

    def _scenario(self, groups: Any, cost: dict[str, Any], row: Row | None = None) -> Scenario:
        drafter = {"k": row.k, "acceptance_length": (row.length, row.k)} if row else None
        workload = {"groups": groups, "prompt_tokens": 200}
        cost = {"type": "roofline", "gpu": "gb200", "model": "Qwen3-8B"} | cost
        return Scenario(System(system={"engines": 32}, cost=cost, workload=workload, drafter=drafter))

    def _draws(self, mean: float) -> list[list[list[int]]]:
        requests, limit, _, draws = self._assumed
        workload = WorkloadConfig(responses=32 * requests, mean_length=mean, limit=limit)
        return [step for seed in range(draws) for step in workload.lengths(seed)]

    def _lengths(self, run: str, measured: float) -> list[list[list[int]]]:
        def off(mean: float) -> float:
            return self._scenario(self._draws(mean), self._base).generation - measured

        return self._draws(brentq(off, self._assumed.limit / 64, 4 * self._assumed.limit, rtol=1e-4))

    def _fitted(self, constant: str, key: tuple[str, int], cost: dict[str, Any]) -> float:
        row = rows()[key]
        return float(brentq(lambda ms: self.speedup(row, cost | {constant: ms}) - row.speedup, 0.0, 20.0, rtol=1e-4))


@cache
def prediction(*assumed: Any) -> Prediction:
    return Prediction(Assumption(*assumed))


def step_of(share: float, generation: float) -> float:
    return 1 / (share / generation + 1 - share)


def amdahl() -> list[tuple[str, float, float]]:
    """Name, and predicted and measured speed-up of a step, from the measured generation times alone."""
    found = []
    for run, stages in data("paper")["stages"].items():
        plain, generation = stages["plain"], stages["speculating"]["generation"]
        share = plain["generation"] / sum(plain.values())
        found.append((f"RL-{run.title()}", step_of(share, plain["generation"] / generation), stages["step_speedup"]))
    return found + [(name, step_of(*shares), step) for name, *shares, step in data("paper")["amdahl"]["rows"]]


def asynchronous() -> tuple[float, float]:
    """Predicted and measured seconds of a step with lag 1 and speculation: the synchronous speed-up, the same learner."""
    measured = data("paper")["asynchronous"]
    plain = measured["plain"]
    speedup, seconds = rows()["think", 0].speedup, 1e3 * plain["step"] / 400
    cost = {"type": "cells", "cells": [[0, 1, seconds], [3, 1, 4 * seconds / speedup]]}
    learner = {"learner_seconds": plain["step"] - plain["exposed_generation"], "lag": 1}
    one = System(
        system=learner, cost=cost, workload={"groups": [[[400]]], "prompt_tokens": 0}, drafter={"accept": [1, 1, 1]}
    )
    return Scenario(one).step(), measured["speculating"]["step"]


def surface_errors() -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of the roofline on SpecDecode-Bench's H100 surface: of steps, and of the ratio to one with k = 0."""
    law, at = data("h100_surface")["law"], data("h100_surface")["compared"]
    batch, cost = (
        np.array(at["batch"], float),
        RooflineCost(
            type="roofline", gpu=law["gpu"], model=law["model"], engine="vllm-2025", host_draft_ms=0.4
        ).step_times(),
    )
    steps, ratios = [], []
    for tokens in (batch * context for context in at["context"]):
        errors = []
        for k in at["k"]:
            measured = law["fixed"] + law["step_overhead"] + law["row"] * batch * (k + 1) + law["context"] * tokens
            if k:
                measured += law["draft_fixed"] + law["draft_row"] * (k + 1) + law["draft_context"] * tokens
            errors.append((cost.base(k, batch) + cost.slope(k) * tokens) / measured)
        steps += errors
        ratios += [error / errors[0] for error in errors[1:]]
    return np.concatenate(steps) - 1, np.concatenate(ratios) - 1


def single_step() -> tuple[float, float]:
    """Predicted and measured seconds of a step of Qwen3-32B on two H100."""
    at = data("h100_surface")["single"]
    shape = {"gpu": at["gpu"], "model": at["model"], "tensor_parallel": at["tensor_parallel"]}
    times = RooflineCost(type="roofline", engine="vllm-2025", **shape).step_times()
    return float(times.base(0, np.array([at["batch"]]))[0] + times.slope(0) * at["batch"] * at["context"]), at[
        "seconds"
    ]


class Drain(NamedTuple):
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


def drains() -> list[Drain]:
    """Speed of a batch that drains from 16 requests to 1, predicted from full batches: the speed-up of its generation."""
    found, cpu = [], data("cpu")
    without = dict(zip(cpu["seconds"]["batch"], cpu["seconds"]["without"], strict=True))
    for session in ("earlier", "later"):
        for drafter, measured in cpu[session]["drain"].items():
            for i, length in enumerate(cpu["acceptance"][drafter]):
                speeds = dict(zip(without, cpu[session]["speed"][drafter][i], strict=True))
                cells = [[0, n, 1e3 * seconds] for n, seconds in without.items()]
                cells += [[i + 1, n, 1e3 * seconds * length / speeds[n]] for n, seconds in without.items()]
                lengths = {"groups": [[[4 * n] for n in range(1, 17)]], "prompt_tokens": 0}
                drafting = {"k": i + 1, "acceptance_length": (length, i + 1)}
                s = Scenario(System(cost={"type": "cells", "cells": cells}, workload=lengths, drafter=drafting))
                found.append(
                    Drain(session, drafter, i + 1, s.speedup, measured[i], cpu[session]["drain_error"][drafter][i])
                )
    return found


def size(errors: Iterable[float]) -> tuple[float, float]:
    """Mean and largest absolute value."""
    absolute = np.abs(list(errors))
    return float(absolute.mean()), float(absolute.max())


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def paper_table() -> list[str]:
    found, lines = (
        prediction(),
        [line("run", "drafter", "k", "acceptance length", "measured", *LEVELS, RULE), "|---" * 10 + "|"],
    )
    errors = [*(found.errors(level) for level in range(len(LEVELS))), rule_errors()]
    for key, row in rows().items():
        cells = (f"{row.speedup * (1 + e[key]):.2f} ({e[key]:+.0%})" if key in e else "fitted" for e in errors)
        lines.append(line(row.run.title(), row.drafter, str(row.k), f"{row.length:.2f}", f"{row.speedup:.2f}", *cells))
    for name, keys in (("k = 3", short_drafts()), ("k > 3", long_drafts()), ("all rows", set(rows()))):
        sizes = [size(error for key, error in e.items() if key in keys) for e in errors]
        lines.append(
            line(f"**mean, largest: {name}**", *[""] * 4, *(f"{mean:.1%}, {most:.0%}" for mean, most in sizes))
        )
    steps = (", ".join(f"{error:+.1%}" for error in found.step_errors(level)) for level in range(len(LEVELS)))
    return [*lines, line("**step, Zero and Think, k = 3**", "DAPO", "3", "", "1.41, 1.35", *steps, "")]


def other_table() -> list[str]:
    def of(predicted: float, measured: float, form: str = ".2f") -> str:
        return f"{predicted:{form}}, measured {measured:{form}} ({predicted / measured - 1:+.1%})"

    steps, ratios = surface_errors()
    others = [prediction(*other, 1) for other in OTHERS]
    sizes = [size(found.errors(1, short_drafts()).values()) for found in others]
    worst = max(abs(error) for found in others for error in found.step_errors(1))
    lines = [line("what", "predicted"), "|---|---|"]
    text = f"k = 3: mean {min(sizes)[0]:.1%} to {max(sizes)[0]:.1%}, largest {max(most for _, most in sizes):.0%}; steps within {worst:.1%}"
    lines.append(line("the table above, one drafted row, with five other workloads", text))
    text = f"mean {size(steps)[0]:.1%}, largest {size(steps)[1]:.0%}; over k = 0: mean {size(ratios)[0]:.1%}, bias {ratios.mean():+.1%}"
    lines.append(line(f"{len(steps)} steps of Llama-3.1-8B on an H100 (SpecDecode-Bench)", text))
    lines.append(line("ms of a step of 32 requests, Qwen3-32B, two H100", of(*(1e3 * t for t in single_step()), ".1f")))
    lines += [line(f"step from measured generation: {name}", of(*pair)) for name, *pair in amdahl()]
    lines.append(
        line("seconds of a step of Think with lag 1, from the speed-up without lag", of(*asynchronous(), ".1f"))
    )
    for session, drafter in dict.fromkeys((drain.session, drain.drafter) for drain in drains()):
        cells = [drain for drain in drains() if (drain.session, drain.drafter) == (session, drafter)]
        text = ", ".join(f"{d.predicted:.2f} ({d.measured:.2f} +- {d.standard_error:.2f})" for d in cells)
        missed = "" if all(d.is_close for d in cells) else ": **missed**"
        lines.append(line(f"CPU, batch of 16 to 1, k = 1, 2, 3, {drafter} drafter, {session} session", text + missed))
    return lines


def text() -> str:
    return "\n".join([*paper_table(), "", *other_table()])


def write_table(begin: str, end: str, table: str) -> None:
    """Replace what the page has between these two lines."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write_table(BEGIN, END, text())
