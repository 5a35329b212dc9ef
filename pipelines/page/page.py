"""A page: an HTML file for a browser and the same in Markdown for a terminal or an editor, with its figures as PNGs beside them.

The reports of runs and studies, and the results of `cotrain bench` and `cotrain verify`, are all written here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from pipelines.page.figures import line_figure

HTML = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>
body{{margin:0 auto;max-width:66rem;padding:1rem;color:#1c2129;font:16px/1.55 system-ui,sans-serif;overflow-wrap:anywhere}}
img{{max-width:100%;height:auto}}
p,li{{max-width:46rem}}
table{{display:block;overflow-x:auto;border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}}
th,td{{padding:.4rem .7rem .4rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #d9dee5;min-width:3rem}}
</style>
{body}</html>
"""

REPORT = "report"
"""Folder of a report inside that of its run or study."""


@dataclass(frozen=True)
class Plot:
    name: str
    """Name of its PNG."""
    title: str
    figure: Figure | None
    """None when nothing of it was measured."""
    text: str
    """How to read the figure."""
    numbers: str = ""
    """Its numbers in short, for a reader who sees no figures."""


@dataclass(frozen=True)
class Section:
    """A heading with a text, a table and figures below."""

    title: str
    text: str = ""
    table: pd.DataFrame | None = None
    plots: Sequence[Plot] = ()


@dataclass(frozen=True)
class Page:
    title: str
    paragraphs: Sequence[str]
    """Below the title; empty ones are left out."""
    sections: Sequence[Section]


def line_plot(name: str, title: str, lines: Mapping[str, pd.Series], ylabel: str, text: str, **options: Any) -> Plot:
    """A plot of those lines that were measured. `options` are those of `line_figure`."""
    measured = {label: values for label, values in lines.items() if values.notna().any()}
    if not measured:
        return Plot(name, title, None, "Not measured.")
    described = (
        f"{label}: {values.dropna().iloc[0]:.2f} first, {values.dropna().iloc[-1]:.2f} last, "
        f"{values.min():.2f} to {values.max():.2f}"
        for label, values in measured.items()
    )
    return Plot(name, title, line_figure(measured, ylabel, **options), text, "; ".join(described))


def write_page(file: Path, page: Page) -> Path:
    """Write the page as a Markdown file, as HTML beside it, and a PNG of each figure. PNGs of an earlier page are removed.

    Returns the Markdown file.
    """
    file.parent.mkdir(exist_ok=True)
    for old in file.parent.glob("*.png"):
        old.unlink()
    parts = [f"# {page.title}", *page.paragraphs]
    for section in page.sections:
        parts += [f"## {section.title}", section.text]
        if section.table is not None:
            parts.append(markdown_table(section.table))
        for plot in section.plots:
            if plot.figure is not None:
                plot.figure.savefig(file.with_name(f"{plot.name}.png"), dpi=160, facecolor="white")
            image = f"![{plot.numbers}]({plot.name}.png)" if plot.figure else ""
            parts += [f"### {plot.title}", image, plot.text]
    text = "\n\n".join(filter(None, parts)) + "\n"
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    file.write_text(text, encoding="utf-8")
    file.with_suffix(".html").write_text(HTML.format(title=escape(page.title), body=body), encoding="utf-8")
    return file


def markdown_table(table: pd.DataFrame) -> str:
    """The table without its index. A cell stays one cell, whatever it holds."""
    cells = table.map(lambda cell: " ".join(str(cell).replace("|", "\\|").split()))
    return str(cells.to_markdown(index=False, disable_numparse=True))
