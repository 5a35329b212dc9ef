"""The figures of an answer: the batch over time, speed-up by draft length and batch, the step over lag, what decides."""

from pathlib import Path

import numpy as np
import pandas as pd

from cotrain.simulation.scenario import Answer, Scenario
from pipelines.page.figures import line_figure, range_figure
from pipelines.simulate.report import arm_name, over_lag
from pipelines.simulate.sweep import tornado


def write_plots(out: Path, s: Scenario, found: Answer) -> None:
    """PNGs in this folder."""
    seconds = np.linspace(0, max(arm.generation.seconds for arm in (found.plain, found.arm)), 60)
    running = {}
    for name, arm in (("no speculation", found.plain), (arm_name(s), found.arm)):
        times, counts = np.array(arm.generation.timeline).T
        running[name] = pd.Series(counts[np.searchsorted(times, seconds, side="right") - 1], seconds)
    figures = {"batch": line_figure(running, "requests running, all engines", "seconds of generation")}
    sizes = s.batches.astype(float)
    speed = {k: pd.Series(s.length(k) * s.step(0, sizes) / s.step(k, sizes), sizes) for k in s.draft_lengths if k}
    if speed:
        lines = {f"k={k}": values for k, values in speed.items()}
        figures["speedup"] = line_figure(lines, "decoding, x no speculation", "requests at once", floor="break-even")
    steps = {name: pd.Series(times) for name, times in over_lag(s, found).items()}
    figures["lag"] = line_figure(steps, "seconds a step", "lag of the policy, steps")
    value, digits = found.generation_speedup.value, 1 if s.envelope else 2
    rows = {name: {"mean": value, "min": min(ends), "max": max(ends)} for name, ends in tornado(s).items()}
    ranges = pd.DataFrame.from_dict(rows, orient="index")
    figures["tornado"] = range_figure(ranges, "speed-up of generation", digits)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=120)
