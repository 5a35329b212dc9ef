"""The HTML page of a report: everything it shows is inside it, so that it can be mailed or put into an archive.

The template page.html escapes all text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from pipelines.page.figures import line_figure, svg_uri

REPORT = "report"
"""Folder of a report inside that of its run or study."""

NOT_MEASURED = "Not measured in this record."


@dataclass(frozen=True)
class Fact:
    """One headline number: "reward", "0.10 -> 0.34", "(mean of the first and the last third)"."""

    label: str
    value: str
    note: str = ""

    @property
    def text(self) -> str:
        return ", ".join(filter(None, (self.value, self.note))).replace(", (", "   (")


@dataclass(frozen=True)
class Plot:
    """A figure, or the reason why there is none."""

    name: str
    """Name of its PNG."""
    title: str
    figure: Figure | None
    text: str
    """How to read the figure; without one, why it is missing."""
    alt: str = ""


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, a table and figures below."""

    title: str
    paragraphs: Sequence[str] = ()
    table: pd.DataFrame | None = None
    """Cells are text, or markupsafe.Markup for links."""
    plots: Sequence[Plot] = ()
    folded: bool = False
    """Closed until the reader opens it."""


@dataclass(frozen=True)
class Page:
    title: str
    kind: str
    subtitle: str
    facts: Sequence[Fact]
    sections: Sequence[Section]
    warning: str = ""
    """Shown at the head."""


def line_plot(name: str, title: str, lines: Mapping[str, pd.Series], ylabel: str, text: str, **options: Any) -> Plot:
    """A plot of those lines that were measured. Without any, it says so instead. `options` are those of `line_figure`."""
    measured = {label: values for label, values in lines.items() if values.notna().any()}
    if not measured:
        return Plot(name, title, None, NOT_MEASURED)
    described = (
        f"{label}: {values.dropna().iloc[0]:.2f} first, {values.dropna().iloc[-1]:.2f} last, "
        f"{values.min():.2f} to {values.max():.2f}"
        for label, values in measured.items()
    )
    return Plot(name, title, line_figure(measured, ylabel, **options), text, "; ".join(described))


def write_page(folder: Path, page: Page) -> Path:
    """Write folder/report/report.html and a PNG of each figure, and remove PNGs of an earlier report. Returns the page."""
    target = folder / REPORT
    target.mkdir(exist_ok=True)
    for old in target.glob("*.png"):
        old.unlink()
    for section in page.sections:
        for plot in section.plots:
            if plot.figure is not None:
                plot.figure.savefig(target / f"{plot.name}.png", dpi=160, facecolor="white")
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    text = environment.get_template("page.html").render(page=page, svg_uri=svg_uri)
    (target / "report.html").write_text(text, encoding="utf-8")
    return target / "report.html"
