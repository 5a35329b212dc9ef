"""The figures of a report, which can be read without colour: lines differ in dash and marker."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDTH = 4.6
"""Inches. At this width, text of the font size below can still be read when a phone shrinks the figure."""

INK, MUTED, GRID = "#1c2129", "#5b6470", "#d9dee5"
COLOURS = ("#0b62a8", "#c2410c", "#0f7b55", "#8a3ea8", "#8a6200", "#b0215c", "#46606e")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "D", "v", "P", "X", "<")
MOST_LINES = len(MARKERS)
"""Maximum number of lines that can be told apart in one figure."""
MARKS = ("^", "x", "|")

STYLE: dict[Any, Any] = {
    "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.edgecolor": MUTED, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, 
    "legend.frameon": False, "legend.handlelength": 3.4,
    "axes.prop_cycle": cycler(color=COLOURS) + cycler(linestyle=DASHES) + cycler(marker=MARKERS),
}  # fmt: skip


def line_figure(
    lines: Mapping[str, pd.Series],
    ylabel: str,
    xlabel: str = "step",
    bands: Mapping[str, tuple[pd.Series, pd.Series]] | None = None,
    marks: Mapping[str, pd.Series] | None = None,
    floor: str | None = None,
) -> Figure:
    """A line for each label over its index, with gaps where it is NaN.

    bands: lowest and highest values around the line of this label. marks: by label, true where the first line gets the
    mark. floor: label of a dotted line at 1, if there is to be one.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.8 + 0.2 * len(lines)), layout="constrained")
        axes = figure.subplots()
        for label, values in lines.items():
            [line] = axes.plot(values.index, values, label=label, linewidth=1.8, markersize=3.5)
            if bands and label in bands:
                axes.fill_between(values.index, *bands[label], color=line.get_color(), alpha=0.16, linewidth=0)
        first = next(iter(lines.values()))
        for (label, marked), marker in zip((marks or {}).items(), MARKS, strict=False):
            if (points := first[marked].dropna()).size:
                style: dict[str, Any] = {"color": INK, "markersize": 8, "zorder": 3}
                axes.plot(points.index, points, label=label, linestyle="none", marker=marker, **style)
        if floor is not None:
            axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (2, 3)), label=floor)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = 2 if max(map(len, labels)) <= 20 else 1
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure
