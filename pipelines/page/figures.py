"""The figures of a report: readable on a phone, in light and dark, and without colour (line style, marker, hatch).

Each is drawn by a function of its width, because a figure for a desktop column is unreadable when it is shrunk.
"""

import base64
import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

NARROW, WIDE = 4.6, 10.4
"""Inches; at 96 CSS pixels an inch a narrow figure is a little wider than a phone, a wide one fills the page."""

INK, MUTED, GRID = "#1c2129", "#5b6470", "#d9dee5"
COLOURS = ("#0b62a8", "#c2410c", "#0f7b55", "#8a3ea8", "#8a6200", "#b0215c", "#46606e", "#3d3d9e")
DARK = dict(
    zip(
        (INK, MUTED, GRID, *COLOURS),
        ("#e8ebf0", "#a3adba", "#353c47",
         "#6cb4f5", "#ff9a62", "#4fcf9d", "#d29aef", "#e0b94e", "#ff8db8", "#a9c0cc", "#a3a6ff"),
        strict=True,
    )
)  # fmt: skip
"""What each colour becomes where the reader prefers dark."""

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1.2, 2)), (0, (9, 3)))
MARKERS = ("o", "s", "D", "v", "P", "X", "<")
HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "++++", "oooo")
MOST_MARKERS = 12
"""Markers on a line before they are thinned out."""
MARKS = ("^", "x", "v")
"""Of the kinds of marks on a line, in their order."""
MOST_MARKS = 40
"""Of one kind before they shrink."""
MOST_BARS = 40
LONGEST = 40
"""Characters of a label in a legend."""
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"


@dataclass(frozen=True)
class Line:
    """Values over x, None where there is none; low and high are a band around them."""

    label: str
    x: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None

    @property
    def measured(self) -> list[float]:
        return [value for value in self.values if value is not None]


def line_figure(
    lines: Sequence[Line],
    ylabel: str,
    width: float,
    xlabel: str = "step",
    marks: Mapping[str, Sequence[int]] | None = None,
    floor: tuple[float, str] | None = None,
) -> Figure:
    """Lines told apart by style and marker. `floor`: a level and its name.

    `marks`: indices marked on the first line, by what the mark says; at most as many kinds as MARKS has. Lines must have
    at least one value each.
    """
    marked = {label: indices for label, indices in (marks or {}).items() if indices}
    labels = [line.label for line in lines] + list(marked)
    labels += [floor[1]] if floor is not None else []
    legend = _legend_rows(labels, width) if len(labels) > 1 else 0
    with _figure(width, height=(2.7 if width == NARROW else 3.5) + 0.2 * legend) as (figure, axes):
        if floor is not None:
            axes.axhline(floor[0], color=MUTED, linewidth=1, linestyle=(0, (2, 3)), label=floor[1])
        for i, line in enumerate(lines):
            alone = len(lines) == 1 and len(line.x) > 3 * MOST_MARKERS
            _draw_line(axes, line, i, plain=alone or (i == 0 and bool(marked) and len(lines) <= 2))
        for marker, (label, indices) in zip(MARKS, marked.items(), strict=False):
            _mark(axes, lines[0], label, indices, marker)
        xs = [x for line in lines for x in line.x]
        axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(min(xs) - 0.5, max(xs) + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6 if width == NARROW else 12, integer=True, min_n_ticks=1))
        if legend:
            _legend(figure, axes, width)
    return figure


def stacked_figure(steps: Sequence[int], stages: Mapping[str, Sequence[float]], width: float) -> Figure:
    """Seconds of each stage, stacked; a bar is a step, or the mean of several when there are many steps."""
    group = math.ceil(len(steps) / MOST_BARS)
    starts = range(0, len(steps), group)
    with _figure(width, height=2.7 + 0.2 * _legend_rows(list(stages), width)) as (figure, axes):
        x = [sum(steps[i : i + group]) / len(steps[i : i + group]) for i in starts]
        bar = 0.85 * min((b - a for a, b in pairwise(x)), default=1)
        bottom = [0.0] * len(x)
        for i, (stage, seconds) in enumerate(stages.items()):
            heights = [sum(seconds[j : j + group]) / len(seconds[j : j + group]) for j in starts]
            axes.bar(
                x, heights, bar, bottom, label=stage, color=COLOURS[i % len(COLOURS)], alpha=0.8,
                hatch=HATCHES[i % len(HATCHES)], edgecolor="white", linewidth=0,
            )  # fmt: skip
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set(xlabel="step", ylabel="seconds a step", xlim=(min(x) - max(bar, 1), max(x) + max(bar, 1)))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6 if width == NARROW else 12, integer=True, min_n_ticks=1))
        _legend(figure, axes, width)
    return figure


def range_figure(
    labels: Sequence[str], spreads: Sequence[tuple[float, float, float]], xlabel: str, at: float, width: float
) -> Figure:
    """A row a label: a dot at the mean, a bar from low to high, its number beside it; a line at `at`."""
    with _figure(width, height=1.1 + 0.42 * len(labels)) as (figure, axes):
        axes.axvline(at, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
        rows = range(len(labels))
        for row, (centre, low, high) in zip(rows, spreads, strict=True):
            colour, marker = COLOURS[row % len(COLOURS)], MARKERS[row % len(MARKERS)]
            axes.plot([low, high], [row, row], color=colour, linewidth=3, alpha=0.5, solid_capstyle="round")
            axes.plot([centre], [row], marker, color=colour, markersize=7)
            axes.annotate(f"{centre:.2f}", (centre, row), (0, 7), textcoords="offset points", ha="center", fontsize=9)
        wrapped = [
            textwrap.fill(label, 22 if width == NARROW else 60, max_lines=2, placeholder="...") for label in labels
        ]
        axes.set_yticks(list(rows), wrapped, fontsize=9)
        axes.set(xlabel=xlabel, ylim=(len(labels) - 0.5, -0.7))
        axes.margins(x=0.12)
    return figure


def svg_uri(figure: Figure) -> str:
    """The figure as a data: URI that follows the reader's light or dark preference."""
    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cotrain"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    figure.set_layout_engine("none")  # settled: the PNG has the same layout at half the time
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for i, colour in enumerate(DARK):
        text = text.replace(colour, f"var(--c{i})")
    light, dark = (
        "".join(f"--c{i}:{colour};" for i, colour in enumerate(palette)) for palette in (DARK, DARK.values())
    )
    style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    text = text.replace("'DejaVu Sans'", FONT).replace("</style>", style, 1)
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()


def save_png(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=160, facecolor="white")


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    look: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 10.5, "axes.labelsize": 10.5, "legend.fontsize": 9.5,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": MUTED, "ytick.color": MUTED,
        "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.edgecolor": MUTED, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID,
        "grid.linewidth": 0.8, "hatch.linewidth": 0.8, "legend.frameon": False,
    }  # fmt: skip
    with rc_context(look):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        yield figure, axes


def _draw_line(axes: Axes, line: Line, i: int, plain: bool) -> None:
    """`plain` leaves out the markers, for a line that nothing can be mistaken for."""
    values = [math.nan if value is None else value for value in line.values]
    colour, dash, marker = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]
    stride = max(1, math.ceil(len(values) / MOST_MARKERS))
    shown = set() if plain else set(range(i * stride // 3 % stride, len(values), stride))
    # Without a neighbour a value is no line: only its marker is seen.
    shown |= {
        j for j in range(len(values)) if all(math.isnan(v) for v in (values[max(j - 1, 0) : j] + values[j + 1 : j + 2]))
    }
    axes.plot(
        line.x, values, color=colour, linestyle=dash, linewidth=1.8, marker=marker, markersize=5,
        markevery=sorted(shown), markerfacecolor=colour if i % 2 == 0 else "none", label=line.label,
    )  # fmt: skip
    if line.low is not None and line.high is not None:
        low, high = ([math.nan if v is None else v for v in edge] for edge in (line.low, line.high))
        axes.fill_between(line.x, low, high, color=colour, alpha=0.16, linewidth=0)


def _mark(axes: Axes, line: Line, label: str, indices: Sequence[int], marker: str) -> None:
    points = [(line.x[j], value) for j in indices if (value := line.values[j]) is not None]
    if not points:
        return
    few = len(points) <= MOST_MARKS
    axes.plot(
        *zip(*points, strict=True), linestyle="none", marker=marker if few else "|", markersize=7 if few else 9,
        color=INK, label=label, zorder=3,
    )  # fmt: skip


def _legend(figure: Figure, axes: Axes, width: float) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = _legend_columns(labels, width)
    figure.legend(handles, [_shortened(label, LONGEST) for label in labels], loc="outside lower center",
                  ncols=columns, handlelength=3.4)  # fmt: skip


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = min(LONGEST, max(map(len, labels)))
    return min(len(labels), max(1, int(width * 12 / (longest + 8))))


def _legend_rows(labels: Sequence[str], width: float) -> int:
    return math.ceil(len(labels) / _legend_columns(labels, width))


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
