"""A finished run as the measured base of a simulation: its records become a SYSTEM.toml, and are checked on the run itself."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cotrain import __version__
from cotrain.config.errors import ConfigError
from cotrain.config.load import Table, read_config
from cotrain.config.schema import RunConfig
from cotrain.records import StepTotal
from cotrain.rollout.speculation.step_costs import rising
from cotrain.run.rows import read_rows
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.scenario import Scenario, generate
from cotrain.simulation.step_time import Cells, MeasuredCells
from cotrain.simulation.system import System, parse_system

LEAST_STEPS, LEAST_DRAFTS = 8, 200
"""Engine steps per cell, and verification steps per depth for its acceptance, from which on they are more than noise."""

MOST_RESPONSES = 1000
"""About as many responses are simulated. More would change an answer by less than the errors of step times and acceptance."""

BOUNDS = {"generation": 0.05, "steps": 0.05, "generation of held-out steps": 0.10}
"""Largest relative errors allowed in predicting a run. The first two replay all steps; the second adds the mean time of a step
besides the engines'. The third predicts every other pair of steps from those between: drafters may train in every second step."""

AGAIN = f"run it again in a version that has cotrain simulate (such as this one, {__version__}), or give a SYSTEM.toml"
FIELDS = {"k": "drafter.k", "num_speculative_tokens": "drafter.k", "max_num_seqs": "system.max_num_seqs"}
FIELDS |= {"num_engines": "system.engines", "lag": "learner.lag", "max_policy_lag": "learner.lag"}
"""Name of a run's field without its section -> field of a SYSTEM.toml."""


@dataclass(frozen=True)
class Run:
    """What a run recorded, in tables with a column `step`.

    engine_steps: engine, k and the other fields of StepTotal. drafts: depth, drafted, accepted, steps, see counts_by_depth.
    groups: engine, lengths and prompt_tokens of each prompt's samples, in the order in which they began. times: the columns
    time/... of metrics.jsonl. timed: seconds of a step measured at the start, by k and batch size.
    """

    folder: Path
    config: RunConfig
    engine_steps: pd.DataFrame
    drafts: pd.DataFrame
    groups: pd.DataFrame
    times: pd.DataFrame
    timed: dict[tuple[int, int], float]

    def only(self, steps: Collection[int]) -> "Run":
        """Return only what was recorded of these steps."""
        tables = {name: getattr(self, name) for name in ("engine_steps", "drafts", "groups", "times")}
        return replace(self, **{name: table[table["step"].isin(steps)] for name, table in tables.items()})

    @property
    def busiest(self) -> pd.Series:
        """By step, the seconds of all engine steps of the engine that worked longest."""
        return self.engine_steps.groupby(["step", "engine"])["seconds"].sum().groupby("step").max()


def recorded(folder: Path) -> Run:
    """Read the steps that are complete in all files. Raises ValueError naming the file that is missing or says too little."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--run {folder}: it is a study; name one of its runs")
    config, rows = read_config(folder / "config.json"), _rows(folder / "steps.jsonl")
    if config.rollout.history is not None:
        raise ValueError(f"{folder}: drafts from history differ in length by request: not simulated from a run")
    totals = [[row["step"], int(e), *t] for row in rows for e, ts in row.get("engines", {}).items() for t in ts]
    drafts = [[row["step"], *counts] for row in rows for counts in row.get("acceptance", ())]
    timed = [cell for row in rows for engine in row.get("measured", ()) for cell in engine]
    events = _rows(folder / "stream.jsonl")
    began = {event["group"]: place for place, event in enumerate(events) if event["event"] == "dispatched"}
    ended = [event for event in events if event["event"] == "finished" and "prompt_tokens" in event]
    ended.sort(key=lambda event: began[event["group"]])
    metrics = [row for row in _rows(folder / "metrics.jsonl") if "time/step_s" in row]
    lost = {event["step"] for event in events if event["event"] == "lost"}  # engines did more here than is recorded
    whole = ({row[0] for row in totals} & {row["step"] for row in ended} & {row["step"] for row in metrics}) - lost
    if not whole:
        raise ValueError(f"{folder}: no step is whole in steps.jsonl, stream.jsonl and metrics.jsonl alike; {AGAIN}")
    return Run(
        folder,
        config,
        pd.DataFrame(totals, columns=["step", "engine", "k", *StepTotal._fields[1:]]),
        pd.DataFrame(drafts, columns=["step", "depth", "drafted", "accepted", "steps"]),
        pd.DataFrame(ended),
        pd.DataFrame(metrics).filter(regex="^(step$|time/)").fillna(0.0),
        {(int(k), int(batch)): seconds for k, batch, seconds, *_ in timed},
    ).only(whole)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file. Raises ValueError if it is missing, damaged or empty."""
    try:
        if rows := read_rows(path):
            return rows
        said = "it is empty" if path.is_file() else "there is no such file"
    except ValueError as error:
        said = f"it is damaged ({error})"
    raise ValueError(f"{path}: {said}; {AGAIN}")


def cells_of(run: Run) -> dict[tuple[int, int], float]:
    """Seconds of a step by k and batch size. Cells without steps come from timings at the start, scaled to the run's pace."""
    sums = run.engine_steps.query("kind == 'steady'").groupby(["k", "batch"])[["num_steps", "seconds"]].sum()
    sums = sums[sums["num_steps"] >= min(LEAST_STEPS, sums["num_steps"].max())]
    cells: dict[tuple[int, int], float] = (sums["seconds"] / sums["num_steps"]).to_dict()
    timed, weights = _in_order(run.timed, {}), sums["num_steps"].to_dict()
    if not (timed and cells):
        return _in_order(cells, weights) or timed
    there = MeasuredCells(timed)
    paces = [np.log(seconds / there.base(k, np.array([batch]))[0]) for (k, batch), seconds in cells.items()]
    pace = float(np.exp(np.average(paces, weights=sums["seconds"])))
    return _in_order({cell: pace * seconds for cell, seconds in timed.items()} | cells, weights)


def _in_order(cells: Cells, weights: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return the closest cells in which, at a batch size, no draft length takes less than a shorter one: that would be noise.

    weights: steps behind a cell; LEAST_STEPS where they are not known.
    """
    found: dict[tuple[int, int], float] = {}
    for batch in {batch for _, batch in cells}:
        column = sorted(cell for cell in cells if cell[1] == batch)
        table, counts = ([[of.get(cell, LEAST_STEPS)] for cell in column] for of in (cells, weights))
        found |= dict(zip(column, rising(np.array(table), np.array(counts, float))[:, 0].tolist(), strict=True))
    return found


def prefill_rate(run: Run, cells: Cells) -> float | None:
    """Prompt tokens per second of the extra time that steps with prompts took over others; None if they took no longer."""
    prompts, cost = run.engine_steps.query("kind == 'prompts'"), MeasuredCells(cells)
    columns = zip(prompts["k"], prompts["batch"], prompts["num_steps"], strict=True)
    more = prompts["seconds"].sum() - sum(n * cost.base(k, np.array([batch]))[0] for k, batch, n in columns)
    tokens = (run.groups["prompt_tokens"] * run.groups["lengths"].map(len)).sum()
    return float(tokens / more) if more > 0 and tokens else None


def ratio_error(run: Run) -> float | None:
    """Relative standard error of step time with drafts over that without, from scatter over steps; None if no cell has two."""
    n = run.engine_steps.query("kind == 'steady'")
    logs = np.log(n["seconds"] / n["num_steps"]).groupby([n["k"] > 0, n["k"], n["batch"]])
    scatter = pd.DataFrame({"error": logs.var() / logs.size(), "weight": logs.size()}).dropna()
    parts = [np.average(part["error"], weights=part["weight"]) for _, part in scatter.groupby(level=0)]
    return float(np.sqrt(sum(parts))) if parts else None


def survival_of(drafts: pd.DataFrame) -> list[float]:
    """Share of drafts of which at least 1, 2, ... tokens are accepted: the product of conditional acceptance by position."""
    rates = []
    for position in range(1, int(drafts["drafted"].max()) + 1):
        reached = drafts[(drafts["drafted"] >= position) & (drafts["accepted"] >= position - 1)]
        if not reached.empty:
            rates.append(reached.loc[reached["accepted"] >= position, "steps"].sum() / reached["steps"].sum())
    return [float(share) for share in np.cumprod(rates)]


def acceptance_of(drafts: pd.DataFrame) -> tuple[list[float], list[tuple[int, list[float]]]]:
    """Return the survival of all drafts, and (first response token, survival) of each depth with enough verification steps."""
    depths = [(int(depth), part) for depth, part in drafts.groupby("depth") if part["steps"].sum() >= LEAST_DRAFTS]
    return survival_of(drafts), [(depth, survival_of(part)) for depth, part in depths]


def groups_of(run: Run) -> tuple[list[list[int]], int]:
    """Return response lengths by prompt, step after step, and the number of steps: all, or evenly spaced ones of a long run."""
    every = -(-int(run.groups["lengths"].map(len).sum()) // MOST_RESPONSES)
    steps = sorted(run.times["step"])[::every]
    groups = run.groups[run.groups["step"].isin(steps)].sort_values("step", kind="stable")
    return groups["lengths"].tolist(), len(steps)


def table_of(run: Run) -> Table:
    """Return what these steps measured, as fields of a SYSTEM.toml."""
    rollout, cells, mean = run.config.rollout, cells_of(run), run.times.mean()
    names = ("step", "generate", "wait_for_rollouts", "learn", "update", "swap_policy")
    step, generate, wait, learn, update, swap = (float(mean.get(f"time/{name}_s", 0.0)) for name in names)
    idle = max(0.0, generate - float(run.busiest.mean()))  # with lag it cannot be known
    seconds = {"update": update, "swap_policy": swap, "other": max(0.0, step - generate - wait - learn - swap)}
    cost: Table = {"type": "cells", "error": ratio_error(run), "prefill_tokens_per_s": prefill_rate(run, cells)}
    cost["cells"] = [[k, batch, 1e3 * s] for (k, batch), s in sorted(cells.items())]
    workload: Table = {"prompt_tokens": round(run.groups["prompt_tokens"].mean())}
    workload["groups"], workload["steps"] = groups_of(run)
    table: Table = {
        "system": {"engines": rollout.num_engines, "max_num_seqs": rollout.max_num_seqs, "overhead_seconds": idle},
        "cost": cost,
        "workload": workload,
        "learner": {"seconds": seconds, "lag": run.config.stream.max_policy_lag},
    }
    if not run.drafts.empty:
        drafter: Table = {"k": rollout.num_speculative_tokens, "adaptive": rollout.speculation.adaptive}
        drafter["accept"], drafter["by_depth"] = acceptance_of(run.drafts)
        lengths = np.array([1 + sum(survival_of(drafts)) for _, drafts in run.drafts.groupby("step")])
        if len(lengths) > 2:  # differences between steps, so that what the drafter learns does not count as error
            drafter["error"] = float(np.sqrt((np.diff(lengths) ** 2).mean() / 2 / len(lengths)) / lengths.mean())
        table["drafter"] = drafter
        if run.config.drafter and run.config.drafter.train:
            first = survival_of(run.drafts[run.drafts["step"] == run.drafts["step"].min()])
            gain = sum(a - b for a, b in zip(drafter["accept"], first, strict=False))  # of positions that both have
            table["cotraining"] = {"gain": gain, "seconds_per_step": max(0.0, learn - update), "exposed": True}
    return table


def run_system(folder: Path, overrides: Sequence[str] = ()) -> System:
    """Build a run's system with key=value overrides. Raises ValueError if too little was recorded, ConfigError for bad values."""
    run = recorded(folder)
    return parse_system(table_of(run), renamed(overrides), f"measured in {len(run.times)} steps of {folder}")


def renamed(overrides: Sequence[str]) -> list[str]:
    """Give key=value overrides the names of a SYSTEM.toml. Raises ConfigError for settings that change what was measured."""
    changes = [(key, key.rpartition(".")[2], value) for key, _, value in (text.partition("=") for text in overrides)]
    if refused := [key for key, name, _ in changes if name in ("temperature", "top_p", "top_k")]:
        line = "how much is accepted and how long responses are both change with it; run again with it"
        raise ConfigError([f"{key}: {line}" for key in refused])
    return [f"{FIELDS.get(name, key)}={value}" for key, name, value in changes]


def check_run(folder: Path) -> int:
    """Print predictions beside measurements. Returns the exit status: 1 if one is off. Raises ValueError if none can be made."""
    status = 0
    for what, (predicted, measured) in compared(recorded(folder)).items():
        error, bound = predicted / measured - 1, BOUNDS[what]
        line = f"{what:<28} predicted {predicted:9.2f} s, measured {measured:9.2f} s: {error:+.1%}, bound {bound:.0%}"
        print(line if abs(error) <= bound else f"{line}  <- off")
        status |= abs(error) > bound
    return int(status)


def compared(run: Run) -> dict[str, tuple[float, float]]:
    """Seconds of all steps together, predicted and measured, for each of BOUNDS."""
    steps = sorted(run.times["step"])
    if run.config.stream.max_policy_lag:
        raise ValueError("--check: with stream.max_policy_lag above 0 no step has a time of its own")
    if len(steps) < 4:
        raise ValueError(f"--check: {len(steps)} whole steps in {run.folder} are too few to hold some out; 4 do")
    held, known = ([n for i, n in enumerate(steps) if (i % 4 > 1) == out] for out in (True, False))
    whole, half = (parse_system(table_of(part), (), "").build() for part in (run, run.only(known)))
    replayed = [generation_seconds(whole, run.only([n]), run.only([n])) for n in steps]
    around = {n: [m for m in known if m < n][-1:] + [m for m in known if m > n][:1] for n in held}
    held_out = [generation_seconds(half, run.only([n]), run.only(around[n])) for n in held]
    step = whole.scheduled(np.array(replayed)).step_seconds
    predicted = sum(replayed), len(steps) * step, sum(held_out) + len(held) * half.generation_overhead
    measured = run.busiest.sum(), run.times["time/step_s"].sum(), run.only(held).times["time/generate_s"].sum()
    return dict(zip(BOUNDS, zip(predicted, map(float, measured), strict=True), strict=True))


def generation_seconds(base: Scenario, step: Run, drafting: Run) -> float:
    """Seconds that engines take to generate a step's responses, each on its own engine again. Step times are those of `base`,
    acceptance and the draft length at each batch size those of `drafting`."""
    decoding = drafting.engine_steps.query("kind != 'prompts'")
    usual = decoding.groupby(["batch", "k"])["num_steps"].sum().unstack(fill_value=0).idxmax(axis=1)
    acceptance = None if drafting.drafts.empty else Acceptance(*acceptance_of(drafting.drafts))
    base = replace(
        base,
        engines=replace(base.engines, count=1),
        prompt_tokens=step.groups["prompt_tokens"].mean(),
        acceptance=acceptance,
        k=usual.reindex(range(base.engines.max_num_seqs + 1), method="nearest").tolist(),
        steps=1,
    )
    engines = (groups["lengths"].tolist() for _, groups in step.groups.groupby("engine"))
    return max(generate(replace(base, lengths=lengths)).seconds for lengths in engines)
