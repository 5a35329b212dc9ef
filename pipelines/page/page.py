"""A page: sections of text, tables and figures, as Markdown for a terminal, as HTML for a browser, and a PNG for each figure.

The reports of runs and studies, and the results of `cotrain bench`, are all written here. Figures can be read
without colour: lines differ in dash and marker.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd
from cycler import cycler
from markdown_it import MarkdownIt
from matplotlib import color_sequences, rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

HTML = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

REPORT = "report"  # folder of a report inside that of its run or study

MARKERS = ("o", "s", "D", "v", "P", "X", "<")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1)), (0, (1, 3)))
MOST_LINES = len(MARKERS)  # maximum number of lines that can be told apart in one figure
STYLE: dict[Any, Any] = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#d9dee5", "legend.frameon": False, "legend.handlelength": 3.4,
    "axes.prop_cycle": cycler(color=color_sequences["Dark2"][:7]) + cycler(linestyle=DASHES) + cycler(marker=MARKERS),
}  # fmt: skip
WIDTH = 4.6  # inches. At this width, text of 10 points can still be read when a phone shrinks the figure.


@dataclass(frozen=True)
class Section:
    """A heading with a text, a table and a figure below. Without a title it belongs to the head of the page."""

    title: str
    text: str = ""
    table: pd.DataFrame | None = None
    figure: Figure | None = None
    numbers: str = ""  # of the figure in short, for a reader who sees no figures

    @property
    def image(self) -> str:
        """Name of the figure's PNG, which is the title up to a comma."""
        return re.sub(r"\W+", "_", self.title.partition(",")[0].lower()) + ".png"


def line_section(
    title: str,
    ylabel: str,
    text: str,
    lines: Mapping[str, pd.Series],
    bands: Mapping[str, tuple[pd.Series, pd.Series]] | None = None,
    marks: Mapping[str, Sequence[int]] | None = None,
    floor: str | None = None,
) -> Section:
    """A figure of those lines that were measured over their index, with gaps where they are NaN. text: how to read it.

    bands: lowest and highest values around the line of this label. marks: by label, where the first line gets the mark.
    floor: label of a dotted line at 1, if there is to be one.
    """
    lines = {label: values for label, values in lines.items() if values.notna().any()}
    if not lines:
        return Section(title, "Not measured.")
    numbers = []
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.8 + 0.2 * len(lines)), layout="constrained")
        axes = figure.subplots()
        for label, values in lines.items():
            [line] = axes.plot(values.index, values, label=label, linewidth=1.8, markersize=3.5)
            if bands:
                axes.fill_between(values.index, *bands[label], color=line.get_color(), alpha=0.16, linewidth=0)
            v = values.dropna()
            numbers.append(f"{label}: {v.iloc[0]:.2f} first, {v.iloc[-1]:.2f} last, {v.min():.2f} to {v.max():.2f}")
        first = next(iter(lines.values()))
        for (label, steps), marker in zip((marks or {}).items(), "^x|", strict=False):
            if (points := first.reindex(steps).dropna()).size:
                axes.plot(points.index, points, marker, label=label, color="black", markersize=8, zorder=3)
        if floor is not None:
            axes.axhline(1, color="gray", linewidth=1, linestyle=(0, (2, 3)), label=floor)
        axes.set(xlabel="step", ylabel=ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = 2 if max(map(len, labels)) <= 20 else 1
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return Section(title, text, figure=figure, numbers="; ".join(numbers))


def write_page(file: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write a page as Markdown and HTML, and its figures as PNGs in place of earlier ones. Returns the Markdown file."""
    file.parent.mkdir(exist_ok=True)
    for old in file.parent.glob("*.png"):
        old.unlink()
    parts = [f"# {title}"]
    for section in sections:
        parts += [section.title and f"## {section.title}", section.text]
        if section.table is not None:
            # A cell stays one cell, whatever it holds.
            cells = section.table.map(lambda cell: " ".join(str(cell).replace("|", "\\|").split()))
            parts.append(str(cells.to_markdown(index=False, disable_numparse=True)))
        if section.figure is not None:
            section.figure.savefig(file.with_name(section.image), dpi=160)
            parts.append(f"![{section.numbers}]({section.image})")
    text = "\n\n".join(filter(None, parts)) + "\n"
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    file.write_text(text, encoding="utf-8")
    file.with_suffix(".html").write_text(HTML.substitute(title=escape(title), body=body), encoding="utf-8")
    return file
