"""What a figure shows where a reader looks for it: its line of no gain, its gaps, its size on a phone."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pipelines.page import page

PHONE_PIXELS = 368
"""Width of a figure on a page of 400 pixels."""


def figure_of(lines: dict[str, pd.Series], floor: str | None = None) -> Figure:
    figure = page.line_section("Lines", "share of the step", "", lines, floor=floor).figure
    assert figure is not None
    return figure


def positions(lines: list[Line2D], axis: str) -> list[list[float]]:
    return [[float(value) for value in getattr(line, f"get_{axis}data")()] for line in lines]


def test_the_line_of_no_gain_is_at_one() -> None:
    drawn = figure_of({"served": pd.Series([1.5, 2.0], [1, 2])}, floor="1: no gain").axes[0]
    assert positions([line for line in drawn.lines if line.get_label() == "1: no gain"], "y") == [[1, 1]]
    without = figure_of({"served": pd.Series([1.5, 2.0], [1, 2])}).axes[0]
    assert len(without.lines) == 1


def test_what_was_not_measured_is_a_gap() -> None:
    drawn = figure_of({"token 2": pd.Series([np.nan, 0.5, 0.0], [1, 2, 3])}).axes[0].lines[0]
    assert np.isnan(drawn.get_ydata()[0]) and list(drawn.get_ydata()[1:]) == [0.5, 0.0]


def test_labels_can_be_read_on_a_phone() -> None:
    lines = {f"a label of an arm, {i}": pd.Series([0.5], [1]) for i in range(page.MOST_LINES)}
    figure = figure_of(lines)
    figure.draw_without_rendering()
    pixels = PHONE_PIXELS / (figure.get_figwidth() * 72)  # of a point
    axes = figure.axes[0]
    texts = [axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *figure.legends[0].get_texts()]
    assert all(text.get_fontsize() * pixels > 10.5 for text in texts)
    width, height = figure.get_size_inches() * figure.dpi
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= width and axes.get_window_extent().height > height / 3
