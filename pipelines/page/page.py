"""The HTML page of a report: everything it shows is inside it, so that it can be mailed or put into a paper's archive.

Text given to this module is plain; it is escaped here.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from pipelines.page.figures import NARROW, WIDE, save_png, svg_uri

REPORT = "report"
"""Folder of a report inside that of its run or study."""

MANY_COLUMNS = 5
"""A table with more does not fit a phone; the page says that it scrolls."""


@dataclass(frozen=True)
class Fact:
    """One headline number: "Reward", "0.10 -> 0.34", "mean of the first and the last third"."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """A figure, drawn by a function of its width in inches, or the reason why there is none."""

    name: str
    """Name of its PNG."""
    title: str
    draw: Callable[[float], Figure] | None
    text: str
    """Under the figure: how to read it. Without a figure: why."""
    alt: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Cells as text; `numeric` columns are set to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()
    links: Sequence[str | None] = ()
    """Address behind the first cell of each row."""


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables and figures below, in this order."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    folded: bool = False
    """Closed until the reader opens it."""


@dataclass(frozen=True)
class Page:
    title: str
    kind: str
    subtitle: str
    summary: str
    facts: Sequence[Fact]
    sections: Sequence[Section]


def write_page(folder: Path, page: Page) -> Path:
    """Write folder/report/report.html and a PNG of each figure; PNGs of an earlier report are removed."""
    target = folder / REPORT
    target.mkdir(exist_ok=True)
    for old in target.glob("*.png"):
        old.unlink()
    html = _document(page, target)
    path, partial = target / "report.html", target / ".report.html.partial"
    partial.write_text(html, encoding="utf-8")
    os.replace(partial, path)
    return path


def markdown_table(table: Table) -> str:
    """The table as Markdown that also reads well as plain text."""
    cells = [[_plain(cell) for cell in row] for row in (table.header, *table.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(table.header))]

    def line(row: Sequence[str]) -> str:
        fitted = (
            cell.rjust(width) if i in table.numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "| " + " | ".join(fitted) + " |"

    rule = ["-" * (width - 1) + ":" if i in table.numeric else "-" * width for i, width in enumerate(widths)]
    return "\n".join(line(row) for row in (cells[0], rule, *cells[1:])) + "\n"


def _plain(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _document(page: Page, target: Path) -> str:
    facts = "".join(
        f"<div><dt>{escape(fact.label)}</dt><dd>{_arrows(fact.value)}"
        + (f"<small>{escape(fact.note)}</small>" if fact.note else "")
        + "</dd></div>"
        for fact in page.facts
    )
    sections = "".join(_section(section, target) for section in page.sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(page.title)} - {escape(page.kind)}</title><style>{STYLE}</style></head><body><main>"
        f'<header><p class="kind">{escape(page.kind)}</p><h1>{escape(page.title)}</h1>'
        f'<p class="subtitle">{escape(page.subtitle)}</p></header>'
        f'<p class="summary">{escape(page.summary)}</p><dl class="facts">{facts}</dl>{sections}</main></body></html>\n'
    )


def _section(section: Section, target: Path) -> str:
    body = "".join(f"<p>{escape(text)}</p>" for text in section.paragraphs)
    body += "".join(map(_table, section.tables))
    plots = "".join(_plot(plot, target) for plot in section.plots)
    body += f'<div class="plots">{plots}</div>' if plots else ""
    if section.folded:
        return f"<details><summary><h2>{escape(section.title)}</h2></summary>{body}</details>"
    return f"<section><h2>{escape(section.title)}</h2>{body}</section>"


def _plot(plot: Plot, target: Path) -> str:
    title = f"<h3>{escape(plot.title)}</h3>"
    if plot.draw is None:
        return f'<figure class="none">{title}<p>{escape(plot.text)}</p></figure>'
    narrow = plot.draw(NARROW)
    wide = plot.draw(WIDE) if plot.wide else None
    save_png(wide or narrow, target / f"{plot.name}.png")
    source = f'<source media="(min-width: 760px)" srcset="{svg_uri(wide)}">' if wide else ""
    image = f'<picture>{source}<img alt="{escape(plot.alt)}" src="{svg_uri(narrow)}"></picture>'
    kind = ' class="wide"' if plot.wide else ""
    return f"<figure{kind}>{title}{image}<figcaption>{escape(plot.text)}</figcaption></figure>"


def _table(table: Table) -> str:
    def cell(tag: str, i: int, text: str, link: str | None = None) -> str:
        inner = f'<a href="{escape(link)}">{escape(text)}</a>' if link else _arrows(text).replace("_", "_<wbr>")
        return f"<{tag}{' class=n' if i in table.numeric else ''}>{inner}</{tag}>"

    links = table.links or [None] * len(table.rows)
    head = "".join(cell("th", i, text) for i, text in enumerate(table.header))
    body = "".join(
        "<tr>" + "".join(cell("td", i, text, link if i == 0 else None) for i, text in enumerate(row)) + "</tr>"
        for row, link in zip(table.rows, links, strict=True)
    )
    wide = " many" if len(table.header) > MANY_COLUMNS else ""
    return f'<div class="table{wide}" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _arrows(text: str) -> str:
    return escape(text).replace("-&gt;", "&rarr;")


STYLE = """
:root{--ink:#1c2129;--muted:#5b6470;--line:#d9dee5;--page:#fff;--card:#f5f7f9;--link:#0b62a8}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf0;--muted:#a3adba;--line:#353c47;--page:#14171c;--card:#1d2229;
--link:#6cb4f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1060px;margin:0 auto;padding:2rem 1rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:.1rem 0 .3rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.6rem 0 .6rem}
h3{font-size:1rem;margin:0 0 .4rem}
.kind{margin:0;color:var(--muted);font-size:.8rem;letter-spacing:.08em;text-transform:uppercase}
.subtitle{margin:0;color:var(--muted);overflow-wrap:anywhere}
p{max-width:46rem;margin:.5rem 0}
.summary{font-size:1.1rem;margin:1.4rem 0}
a{color:var(--link)}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,12.5rem),1fr));gap:.7rem;margin:0}
.facts div{background:var(--card);border-radius:8px;padding:.7rem .9rem}
dt{color:var(--muted);font-size:.85rem}
dd{margin:0;font-size:1.35rem;font-weight:600;line-height:1.35;font-variant-numeric:tabular-nums}
dd small{display:block;font-size:.8rem;font-weight:400;color:var(--muted);line-height:1.35}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:2rem 2.2rem;
margin-top:1.2rem}
figure{margin:0;min-width:0}
figure.wide{grid-column:1/-1}
figure.none p{background:var(--card);border-radius:8px;padding:1rem;margin:0;color:var(--muted)}
img{display:block;width:100%;height:auto}
figcaption{color:var(--muted);font-size:.87rem;line-height:1.45;margin-top:.4rem;max-width:46rem}
.table{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .7rem .4rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--muted);font-weight:600;vertical-align:bottom}
td{min-width:3rem}
th:first-child,td:first-child{position:sticky;left:0;background:var(--page)}
.n{text-align:right}
td.n{white-space:nowrap}
details{margin-top:2.6rem}
summary{cursor:pointer}
summary h2{display:inline;margin:0}
@media(max-width:760px){.many::before{content:"scroll the table sideways for more columns";display:block;
position:sticky;left:0;color:var(--muted);font-size:.8rem}}
@media(max-width:480px){.facts{grid-template-columns:1fr 1fr}dd{font-size:1.1rem}main{padding-top:1.2rem}}
@media print{details{display:block}}
"""
