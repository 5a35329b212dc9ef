"""Turns the measurements of `cotrain bench` into ratios within each round and a table of arms."""

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd

from cotrain.config.errors import validated
from cotrain.config.load import Table
from cotrain.run.provenance import machine
from cotrain.simulation.roofline import Model, entries
from cotrain.simulation.system import RooflineCost
from drafters.base import Drafter, TargetSpec
from drafters.build import kind_of
from drafters.config import BLOCK_DRAFTERS
from drafters.files import write_json
from pipelines.engines import EngineSetup, headline
from pipelines.page.page import Section, write_page

StepTime = Callable[[int, int], float] | None  # milliseconds of a decode step by draft length and batch size
ADAPTIVE = "adaptive"
METHODS = ("none", "suffix", "greedy", "probabilistic", ADAPTIVE, "adaptive-suffix")


@dataclass(frozen=True)
class Arm:
    method: str
    num_speculative_tokens: int  # draft tokens per verification step; the maximum for an adaptive arm

    @property
    def adapts(self) -> bool:
        """The engine chooses the draft length."""
        return self.method.startswith(ADAPTIVE)

    @property
    def uses_history(self) -> bool:
        """The engine drafts from what it generated in earlier rounds."""
        return self.method.endswith("suffix")

    @property
    def uses_drafter(self) -> bool:
        return self.method != "none" and not self.uses_history

    @property
    def engine(self) -> str:
        """Name of its engine. An arm with history shares it with no other, else it would draft from what others generated."""
        return self.method if self.uses_history else "drafter" if self.uses_drafter else "stock"

    def __str__(self) -> str:
        if self.method == "none":
            return "no speculation"
        return f"{self.method} k{'<=' if self.adapts else '='}{self.num_speculative_tokens}"


NO_SPECULATION = Arm("none", 0)


@dataclass(frozen=True)
class Turn:
    """One batch of prompts that one arm has responded to."""

    arm: str
    batch: int
    round: int
    num_tokens: int  # tokens decoded, without the first of each response, which comes from prefilling the prompt
    timed_tokens: int
    seconds: float
    """What decoding timed_tokens took: while the whole batch runs, or all of it if responses end one after another."""
    num_drafts: int = 0  # verification steps with draft tokens, summed over requests
    accepted_per_position: tuple[int, ...] = ()  # verification steps that accepted a draft position and all before it
    k: int | None = None  # draft length of a drafter; None where the engine chooses it or drafts from history
    step_ms: float | None = None
    """Mean milliseconds of a decode step of the whole batch; None if responses end one after another."""

    @property
    def num_steps(self) -> int:
        """Decoding steps summed over requests. A step without draft tokens counts too, and emits one token."""
        return max(self.num_drafts, self.num_tokens - sum(self.accepted_per_position))


def results(turns: list[Turn], simulated: StepTime = None) -> pd.DataFrame:
    """A row for each batch size and arm; the index names both, as in "batch 4, greedy k=2". simulated: what is printed beside a step.

    Ratios are to no speculation in the same round: geometric mean, its standard error from the scatter over rounds (NaN
    with a single round), smallest and largest.
    """
    table = pd.DataFrame([asdict(turn) | {"num_steps": turn.num_steps} for turn in turns])
    timed = table.groupby(["batch", "arm", "round"])[["timed_tokens", "seconds"]].sum()
    speeds = (timed["timed_tokens"] / timed["seconds"]).unstack("round")
    rows = {}
    for (batch, arm), own in table.sort_values("batch", kind="stable").groupby(["batch", "arm"], sort=False):
        ratios = speeds.loc[(batch, arm)] / speeds.loc[(batch, str(NO_SPECULATION))]
        accepted = pd.DataFrame([counts for counts in own["accepted_per_position"] if counts]).sum()
        average, k = np.exp(np.log(ratios).mean()), own["k"].iloc[0]
        rows[f"batch {batch}, {arm}"] = {
            "tokens/s": speeds.loc[(batch, arm)].median(),
            "ratio": average,
            "+-": average * np.log(ratios).sem(),
            "min": ratios.min(),
            "max": ratios.max(),
            "ms a step": own["step_ms"].astype(float).median(),
            **({"simulated ms": np.nan if pd.isna(k) else simulated(int(k), batch)} if simulated else {}),
            "acceptance length": 1 + accepted.sum() / own["num_steps"].sum(),
            "accepted at 1, 2, ...": (accepted / own["num_drafts"].sum()).round(3).tolist(),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def roofline(options: argparse.Namespace, setup: EngineSetup) -> Table:
    """What the simulator needs to know of an engine that is measured, as fields of a RooflineCost; the GPU only if it is known."""
    name, words = Path(options.model).name, machine()["gpus"][:1]
    policy = _shape(TargetSpec.from_pretrained(setup.model), f"config.json of {name}")
    models, drafter = {name: asdict(policy)}, Table()
    if setup.drafter and setup.drafter_folder:
        kind = kind_of(setup.drafter_folder)
        own = policy.drafter(kind) if kind == "mtp" else _drafter_shape(setup.drafter, kind)
        models["drafter"], drafter = asdict(own), {"drafter": "drafter"}
    here = re.split(r"\W+", " ".join(words).lower())
    gpu = options.gpu or next((gpu for gpu in entries("gpus") if gpu.partition("-")[0] in here), None)
    fields = {"type": "roofline", "model": name, "models": models, **drafter, **({"gpu": gpu} if gpu else {})}
    context = mean(map(len, setup.prompts)) + options.tokens / 2
    return fields | {"tensor_parallel": setup.rollout.tensor_parallel_size, "cells_context": context}


def _shape(t: TargetSpec, source: str) -> Model:
    heads = t.num_attention_heads, t.num_key_value_heads, t.head_dim
    return Model(t.num_layers, t.hidden_size, *heads, t.intermediate_size, t.vocab_size, source)


def _drafter_shape(drafter: Drafter, kind: str) -> Model:
    sizes, width = drafter.shape.sizes, len(drafter.serving.aux_layers)
    model = _shape(sizes, f"config.json of the {kind} drafter")
    model = replace(model, vocabulary=len(drafter.draft_to_target), fused=width * sizes.hidden_size)
    return replace(model, one_pass=kind in BLOCK_DRAFTERS)


def simulated_ms(fields: Table) -> StepTime:
    """Return the simulator's milliseconds of a step; None without a GPU. Raises ValueError for one it does not know, or too small."""
    if "gpu" not in fields:
        return None
    try:
        times = validated(RooflineCost, fields).step_times()
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from error
    context = fields["cells_context"]
    return lambda k, batch: 1e3 * float(times.base(k, np.array([batch]))[0] + times.slope(k) * batch * context)


def write_results(out: Path, about: dict[str, Any], turns: list[Turn], simulated: StepTime = None) -> Path:
    """Write bench.json and the page bench.md; returns the page. simulated: see `results`."""
    table = results(turns, simulated).rename_axis("arm").reset_index()
    arms = table.astype(object).where(table.notna(), None).to_dict("records")
    write_json(out / "bench.json", about | {"arms": arms, "turns": [asdict(turn) for turn in turns]})
    options = about["options"]
    each = "at most " if options["stop_at_eos"] or options["drain"] else ""
    synthetic = f"**No text of this means anything**: weights are random. Prompts of {options['context']} tokens."
    head = [
        *([synthetic] if options["synthetic"] else []),
        headline(about) + f", load before the start {about['load']}",
        f"Temperature {options['temperature']:g}, {each}{options['tokens']} tokens a response, {options['rounds']} rounds of "
        f"{options['groups']} batches.",
        *(f"Note: {note}." for note in about["notes"]),
    ]
    text = (
        f"tokens/s: decoding {'of the whole turn' if each else 'while the whole batch runs'}, median over rounds. ratio: to "
        "no speculation in the same round, geometric mean with its standard error by the scatter of the rounds, and range. "
        "acceptance length: tokens per verification step. accepted: share of drafts whose position was accepted."
    )
    sections = [*(Section("", line) for line in head), Section("Arms", text, table.round(3).fillna("-"))]
    return write_page(out / "bench.md", "Speed", sections)
