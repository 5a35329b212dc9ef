"""The figures of a report, which can be read without colour: lines differ in dash and marker."""

import base64
import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDTH = 4.6
"""Inches. At this width, text of the font size below still has 11 pixels when a phone shrinks the figure to 370."""

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
    "legend.frameon": False, "legend.handlelength": 3.4, "svg.fonttype": "none", "svg.hashsalt": "cotrain",
    "axes.prop_cycle": cycler(color=COLOURS) + cycler(linestyle=DASHES) + cycler(marker=MARKERS),
}  # fmt: skip


@contextmanager
def _styled_axes(height: float) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure with its axes in STYLE. Height is in inches."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.subplots()


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
    with _styled_axes(2.8 + 0.2 * len(lines)) as (figure, axes):
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


def range_figure(ranges: pd.DataFrame, xlabel: str, digits: int = 2) -> Figure:
    """A row for each label of the index: a dot at `mean`, a bar from `min` to `max`, and a line at 1."""
    rows = range(len(ranges))
    with _styled_axes(1.1 + 0.42 * len(ranges)) as (figure, axes):
        axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
        axes.hlines(rows, ranges["min"], ranges["max"], color=COLOURS[0], linewidth=3, alpha=0.5)
        axes.plot(ranges["mean"], rows, "o", color=COLOURS[0], markersize=7)
        for row, mean in zip(rows, ranges["mean"], strict=True):
            at = (mean, row), (0, 7)
            axes.annotate(f"{mean:.{digits}f}", *at, textcoords="offset points", ha="center", fontsize=9)
        axes.set_yticks(rows, [textwrap.fill(label, 24) for label in ranges.index], fontsize=9)
        axes.set(xlabel=xlabel, ylim=(len(ranges) - 0.5, -0.7))
        axes.margins(x=0.12)
    return figure


def timeline_figure(rows: Mapping[str, Sequence[tuple[float, float]]], swaps: Mapping[str, Sequence[float]]) -> Figure:
    """A row for each label with bars from begin to end (seconds), darker where they overlap; swaps are vertical lines."""
    with _styled_axes(1.2 + 0.4 * len(rows)) as (figure, axes):
        for row, bars in enumerate(rows.values()):
            lengths = [(begin, end - begin) for begin, end in bars]
            axes.broken_barh(lengths, (row - 0.35, 0.7), color=COLOURS[row % len(COLOURS)], alpha=0.4, linewidth=0)
        for number, (label, times) in enumerate(swaps.items()):
            style: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": DASHES[number]}
            axes.vlines(times, -0.5, len(rows) - 0.5, label=label, **style)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
        axes.set(xlabel="seconds", ylim=(len(rows) - 0.5, -0.5))
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def svg_uri(figure: Figure) -> str:
    """The figure as a data: URI."""
    stream = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()
