"""A finished run as the measured base of a simulation: its records become a SYSTEM.toml."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cotrain.config.load import Table, read_config
from cotrain.config.schema import RunConfig
from cotrain.records import StepTotal
from cotrain.run.rows import read_rows
from cotrain.simulation.step_time import MeasuredCells
from cotrain.simulation.system import System, load_system

LEAST_STEPS, LEAST_DRAFTS, MOST_RESPONSES = 8, 200, 1000
"""Engine steps per cell, and verification steps per depth, that are more than noise; about as many responses are simulated."""


@dataclass(frozen=True)
class Run:
    """What a run recorded, in tables with a column `step`: engine_steps with fields of StepTotal, drafts (see counts_by_depth),
    groups of a prompt's responses in the order in which they began, times of metrics.jsonl."""

    config: RunConfig
    engine_steps: pd.DataFrame
    drafts: pd.DataFrame
    groups: pd.DataFrame
    times: pd.DataFrame

    def only(self, steps: Collection[int]) -> "Run":
        """Return only what was recorded of these steps."""
        tables = self.engine_steps, self.drafts, self.groups, self.times
        return Run(self.config, *(table[table["step"].isin(steps)] for table in tables))

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
    events = _rows(folder / "stream.jsonl")
    began = {event["group"]: place for place, event in enumerate(events) if event["event"] == "dispatched"}
    ended = [event for event in events if event["event"] == "finished" and "prompt_tokens" in event]
    ended.sort(key=lambda event: began[event["group"]])
    metrics = [row for row in _rows(folder / "metrics.jsonl") if "time/step_s" in row]
    lost = {event["step"] for event in events if event["event"] == "lost"}  # engines did more here than is recorded
    whole = ({row[0] for row in totals} & {row["step"] for row in ended} & {row["step"] for row in metrics}) - lost
    if not whole:
        raise ValueError(f"{folder}: no step is whole in steps.jsonl, stream.jsonl and metrics.jsonl; run it again")
    return Run(
        config,
        pd.DataFrame(totals, columns=["step", "engine", "k", *StepTotal._fields[1:]]),
        pd.DataFrame(drafts, columns=["step", "depth", "drafted", "accepted", "steps"]),
        pd.DataFrame(ended),
        pd.DataFrame(metrics).filter(regex="^(step$|time/)").fillna(0.0),
    ).only(whole)


def _rows(path: Path) -> list[dict[str, Any]]:
    if rows := read_rows(path):
        return rows
    raise ValueError(f"{path}: it is missing or empty; run it again in this version, or give a SYSTEM.toml")


def step_times(run: Run) -> tuple[dict[tuple[int, int], float], float | None]:
    """Return seconds of a step by k and batch size, and prompt tokens per second of the extra time of steps with prompts.

    Engines try every draft length now and then, so that a run has steps of all of them.
    """
    sums = run.engine_steps.query("kind == 'steady'").groupby(["k", "batch"])[["num_steps", "seconds"]].sum()
    sums = sums[sums["num_steps"] >= min(LEAST_STEPS, sums["num_steps"].max())]
    cells: dict[tuple[int, int], float] = (sums["seconds"] / sums["num_steps"]).to_dict()
    prompts = run.engine_steps.query("kind == 'prompts'")
    cost, columns = MeasuredCells(cells), zip(prompts["k"], prompts["batch"], prompts["num_steps"], strict=True)
    more = prompts["seconds"].sum() - sum(n * cost.base(k, np.array([batch]))[0] for k, batch, n in columns)
    tokens = (run.groups["prompt_tokens"] * run.groups["lengths"].map(len)).sum()
    return cells, float(tokens / more) if more > 0 and tokens else None


def survival_of(drafts: pd.DataFrame) -> list[float]:
    """Share of drafts of which at least 1, 2, ... tokens are accepted: the product of conditional acceptance by position."""
    rates = []
    for position in range(1, int(drafts["drafted"].max()) + 1):
        reached = drafts[(drafts["drafted"] >= position) & (drafts["accepted"] >= position - 1)]
        if not reached.empty:
            rates.append(reached.loc[reached["accepted"] >= position, "steps"].sum() / reached["steps"].sum())
    return [float(share) for share in np.cumprod(rates)]


def table_of(run: Run) -> Table:
    """Return what these steps measured, as fields of a SYSTEM.toml."""
    rollout, mean, (cells, prefill) = run.config.rollout, run.times.mean(), step_times(run)
    training = max(0.0, float(mean.get("time/learn_s", 0.0) - mean.get("time/update_s", 0.0)))
    generating = float(mean.get("time/wait_for_rollouts_s", run.busiest.mean()))  # with lag, what the learner waits for
    groups = [part["lengths"].tolist() for _, part in run.groups.groupby("step")]
    every = -(-sum(map(len, chain(*groups))) // MOST_RESPONSES)  # evenly spaced steps of a long run
    learning = max(0.0, float(mean["time/step_s"]) - generating - training)
    system = {"engines": rollout.num_engines, "max_num_seqs": rollout.max_num_seqs, "learner_seconds": learning}
    cost = {"type": "cells", "cells": [[k, n, 1e3 * s] for (k, n), s in sorted(cells.items())]}
    table: Table = {"system": system | {"lag": run.config.stream.max_policy_lag}}
    table["workload"] = {"groups": groups[::every], "prompt_tokens": float(run.groups["prompt_tokens"].mean())}
    table["cost"] = cost | {"prefill_tokens_per_s": prefill}
    if not run.drafts.empty:
        parts = [(int(depth), part) for depth, part in run.drafts.groupby("depth")]
        depths = [(depth, survival_of(part)) for depth, part in parts if part["steps"].sum() >= LEAST_DRAFTS]
        drafter = {"k": rollout.num_speculative_tokens, "adaptive": rollout.speculation.adaptive, "by_depth": depths}
        table["drafter"] = drafter | {"accept": survival_of(run.drafts), "training_seconds": training}
    return table


def run_system(folder: Path, overrides: Sequence[str] = ()) -> System:
    """Build a run's system with key=value overrides of its fields. Raises ValueError if too little was recorded."""
    table = table_of(recorded(folder))
    if any(text.startswith("drafter.accept=") for text in overrides):
        table.get("drafter", {}).pop("by_depth", None)
    return load_system(table, overrides)
