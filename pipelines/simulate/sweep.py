"""Many cells of one system without drawing: `--sweep`, speed-up by draft length, and which input decides the answer."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cotrain.config.errors import ConfigError
from cotrain.simulation.roofline import Roofline
from cotrain.simulation.scenario import Scenario, generation_seconds
from cotrain.simulation.step_time import Paced
from cotrain.simulation.system import System, parse_system


def sweep(system: System, asked: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each combination of the values of `key=0..7` or `key=1,2,4`. Raises ConfigError naming the cell."""
    rows = []
    for overrides in itertools.product(*map(_overrides, asked)):
        try:
            scenario = parse_system(system.table, overrides).build()
        except ConfigError as error:
            raise ConfigError([f"--sweep {' '.join(overrides)}: {line}" for line in error.problems]) from None
        arms = (scenario.without_speculation(), scenario)
        generation = [generation_seconds(arm) for arm in arms]
        steps = [arm.scheduled(np.array([t])).step_seconds for arm, t in zip(arms, generation, strict=True)]
        numbers = {"generation s": generation[1], "generation x": generation[0] / generation[1]}
        numbers |= {"step s": steps[1], "step x": steps[0] / steps[1]}
        row: dict[str, Any] = dict(override.split("=", 1) for override in overrides)
        row |= {name: rounded(number, scenario) for name, number in numbers.items()}
        rows.append(row | {"step times": how_known(scenario)})
    return rows


def rounded(number: float, scenario: Scenario) -> float:
    """To four digits; to two in an envelope, which knows no more."""
    return float(f"{number:.{2 if scenario.envelope else 4}g}")


def _overrides(text: str) -> list[str]:
    key, _, values = text.partition("=")
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", values)
    chosen = [str(n) for n in range(int(ends[1]), int(ends[2]) + 1)] if ends else values.split(",")
    if not key or not chosen or "" in chosen:
        raise ConfigError([f"--sweep {text}: write key=values, for example drafter.k=0..7 or system.engines=8,16"])
    return [f"{key}={value}" for value in chosen]


def how_known(scenario: Scenario) -> str:
    """Where step times come from, and at which batch sizes they are extrapolated."""
    s, known = scenario, str(scenario.cost.origin)
    if s.drafted_k:
        known += f" adjusted to steps with k = {', '.join(map(str, s.drafted_k))}"
    if s.envelope:
        known += f", an envelope: no measured speculating step{' of such k' if s.drafted_k else ''}"
    beyond = extrapolated(s)
    return f"{known}, EXTRAPOLATED at batch {beyond[0]} to {beyond[-1]}" if beyond else known


def extrapolated(s: Scenario) -> list[int]:
    """Batch sizes beyond what was measured."""
    return [b for b in s.batches.tolist() if not (s.cost.covers(s.k_at(b), b) and s.cost.covers(0, b))]


def speedup(scenario: Scenario) -> float:
    """The speed-up of generation, without drawing."""
    return generation_seconds(scenario.without_speculation()) / generation_seconds(scenario)


def tornado(scenario: Scenario) -> dict[str, tuple[float, float]]:
    """Speed-up of generation with each input so many times as large, the most decisive first."""
    s, cost, engines, k = scenario, scenario.cost, scenario.engines, scenario.most_drafted
    most = engines.kv_tokens - s.prompt_tokens if engines.kv_tokens else np.inf
    inputs: dict[str, Callable[[float], Scenario]] = {
        "engines": lambda f: replace(s, engines=replace(engines, count=max(1, round(f * engines.count)))),
        "length of responses": lambda f: replace(
            s, lengths=[[int(min(max(1, f * length), most)) for length in group] for group in s.lengths]
        ),
    }
    if isinstance(cost, Roofline):
        h, host, of = cost.hardware, cost.host, lambda *changes: replace(s, cost=cost.changed(*changes))
        inputs |= {
            "bandwidth of memory": lambda f: of(replace(h, memory_bandwidth=f * h.memory_bandwidth)),
            "operations a second": lambda f: of(replace(h, flops={p: f * n for p, n in h.flops.items()})),
            "host time of a draft token": lambda f: of(None, replace(host, draft_s=f * host.draft_s)),
            "host time of a step": lambda f: of(None, replace(host, step_s=f * host.step_s)),
        }
    found = {f"{name} x0.5, x2": (speedup(change(0.5)), speedup(change(2.0))) for name, change in inputs.items()}
    if k:
        shorter, longer = (speedup(s.longer(tokens, k)) for tokens in (-0.1 * s.length(k), 0.1 * s.length(k)))
        found["acceptance length x0.9, x1.1"] = (shorter, longer)
        faster, slower = (speedup(replace(s, cost=Paced(cost, pace))) for pace in (0.9, 1.1))
        found["time of a speculating step x0.9, x1.1"] = (faster, slower)
    return dict(sorted(found.items(), key=lambda item: -abs(np.log(item[1][0] / item[1][1]))))
