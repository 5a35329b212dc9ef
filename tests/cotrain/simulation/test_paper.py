"""Published runs beside their prediction, within the bounds of docs/simulator.md; and that page's table."""

import pytest

from benchmarks.simulator_table import BEGIN, END, PAGE, main, text
from benchmarks.simulator_validation import (
    FITTED_TO,
    amdahl,
    asynchronous,
    law_of_projection,
    long_drafts,
    own_projection,
    prediction,
    short_drafts,
    size,
    workloads,
)
from cotrain.simulation.roofline import hardware, tables
from cotrain.simulation.scenario import TOO_HIGH


def test_the_page_holds_the_table() -> None:
    held = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert held.strip() == text(), "python -m benchmarks.simulator_table writes the table of docs/simulator.md"


def test_the_first_table_is_printed_of_other_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["simulator_table", "--draws", "1"])
    before = PAGE.read_text(encoding="utf-8")
    assert main() == 0 and PAGE.read_text(encoding="utf-8") == before
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 20 and not set(rows[2:7]) <= set(before.splitlines())


def test_a_row_without_speculation_says_nothing_of_speculation() -> None:
    """It is met exactly, and every row of k = 3 comes out too fast by half, whatever the workload: no default to have."""
    assert all(error > 0.38 for error in prediction().errors(0, short_drafts()).values())
    assert all(0.30 < found.errors(0)[FITTED_TO] < 0.57 for _, found in workloads())
    assert all(0.10 < error < 0.25 for _, found in workloads() for error in found.steps[0])


def test_envelopes_are_as_much_too_high_as_the_interval_of_another_says() -> None:
    found = [error for level in (short_drafts(), long_drafts()) for error in prediction().errors(0, level).values()]
    found += [error for _, of_other in workloads() for error in of_other.errors(0, short_drafts()).values()]
    least, most = TOO_HIGH
    assert least == pytest.approx(1 + min(found), abs=0.03) and most == pytest.approx(1 + max(found), abs=0.03)


def test_one_drafted_row_tells_the_others_of_its_length_and_the_step() -> None:
    for assumption, found in workloads():
        errors = found.errors(1, short_drafts())
        mean, largest = size(errors.values())
        assert len(errors) == 7
        assert mean < 0.09 and largest < 0.20, assumption
        assert max(map(abs, found.steps[1])) < 0.035, assumption


def test_long_drafts_leave_the_graphs() -> None:
    """With the eager operations of the operator tables, and then with the step outside graphs fitted to a second row."""
    found = prediction()
    assert size(found.errors(1, long_drafts()).values())[0] > 0.5
    assert size(found.errors(2, long_drafts()).values())[0] < 0.08
    assert size(found.errors(3, long_drafts()).values())[0] < 0.06
    errors = found.errors(3)
    assert len(errors) == 12 and size(errors.values())[0] < 0.10


def test_the_default_of_the_gpu_is_what_the_drafted_row_gives() -> None:
    assert hardware("gb200").host.draft_s == pytest.approx(prediction().costs[1].host.draft_s, rel=0.01)
    assert hardware("gb200").host.eager_layer_s == pytest.approx(prediction().costs[3].host.eager_layer_s, rel=0.2)


def test_steps_follow_from_measured_generation() -> None:
    assert len(amdahl()) == 5
    assert all(predicted == pytest.approx(measured, rel=0.034) for _, predicted, measured in amdahl())


def test_with_lag_the_learner_is_the_limit() -> None:
    predicted, measured = asynchronous()
    assert predicted == pytest.approx(75.0 - 10.4)
    assert predicted == pytest.approx(measured, rel=0.08)


def test_the_projection_is_two_numbers_and_ours_lies_around_and_below_it() -> None:
    cells = tables("paper")["projection"]["cells"]
    for (_, _, generation, step), law in zip(cells, law_of_projection(), strict=True):
        assert law == pytest.approx((generation, step), rel=0.01)
    for i, (_, length, generation, _) in enumerate(cells):
        ours = [speedups[i][0] for speedups in own_projection().values()]
        assert 1 < min(ours) < max(ours) < min(length, generation)
