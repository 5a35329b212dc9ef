"""Measured systems beside their prediction, within the bounds of docs/measurements/simulator.md; and that page's table."""

import pytest

from benchmarks.simulator_validation import (
    BEGIN,
    END,
    FITTED_TO,
    OTHERS,
    PAGE,
    amdahl,
    asynchronous,
    data,
    drains,
    long_drafts,
    prediction,
    short_drafts,
    single_step,
    size,
    surface_errors,
    text,
)
from cotrain.simulation.roofline import entries
from pipelines.simulate.report import BLIND, MEASURED


def test_the_page_holds_the_table() -> None:
    held = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert held.strip() == text(), (
        "python -m benchmarks.simulator_validation writes the table of docs/measurements/simulator.md"
    )


@pytest.mark.parametrize("name", ["paper", "h100_surface", "cpu"])
def test_measurements_have_a_source(name: str) -> None:
    tables = [part for part in data(name).values() if any(not isinstance(value, dict) for value in part.values())]
    assert tables and all(part.get("source") or "error" in part for part in tables)


def test_what_the_report_says_of_known_predictions_is_what_they_were() -> None:
    blind = prediction().errors(0).values()
    assert BLIND[0] < min(blind) and max(blind) < BLIND[1] + 0.005
    known = [*prediction().errors(1, short_drafts()).values(), *prediction().errors(3).values()]
    known += [drain.predicted / drain.measured - 1 for drain in drains()]
    assert MEASURED[0] < min(known) < -0.01 and 0.19 < max(known) < MEASURED[1] + 0.005


def test_one_drafted_row_tells_the_others_of_its_length_and_the_step() -> None:
    """Whatever workload is assumed, and a row without speculation tells nothing of speculation."""
    for found in (prediction(), *(prediction(*other, 1) for other in OTHERS)):
        mean, largest = size(found.errors(1, short_drafts()).values())
        assert mean < 0.09 and largest < 0.20 and max(map(abs, found.step_errors(1))) < 0.035
        assert 0.30 < found.errors(0, {FITTED_TO})[FITTED_TO] < 0.57


def test_long_drafts_leave_the_graphs() -> None:
    """With the eager operations of the operator tables, and then with the step outside graphs fitted to a second row."""
    mean, largest = zip(*(size(prediction().errors(level, long_drafts()).values()) for level in (1, 2, 3)), strict=True)
    assert mean[0] > 0.5 and mean[1] < 0.08 and mean[2] < 0.06 and max(largest[1:]) < 0.12


def test_the_default_of_the_gpu_is_what_the_drafted_row_gives() -> None:
    costs, gpu = prediction().costs, entries("hardware")["gb200"]
    assert 1e3 * gpu.host_draft_s == pytest.approx(costs[1]["host_draft_ms"], rel=0.02)
    assert 1e3 * gpu.eager_layer_s == pytest.approx(costs[3]["eager_layer_ms"], rel=0.2)


def test_steps_of_an_h100_and_their_ratio_to_no_speculation() -> None:
    steps, ratios = surface_errors()
    assert len(steps) == 144 and size(steps)[0] < 0.10 and size(steps)[1] < 0.25
    assert size(ratios)[0] < 0.10 and abs(ratios.mean()) < 0.08
    predicted, measured = single_step()
    assert predicted == pytest.approx(measured, rel=0.15)


def test_steps_follow_from_measured_generation_and_with_lag_from_the_learner() -> None:
    assert len(amdahl()) == 5
    assert all(predicted == pytest.approx(measured, rel=0.034) for _, predicted, measured in amdahl())
    predicted, measured = asynchronous()
    assert predicted == pytest.approx(75.0 - 10.4) and predicted == pytest.approx(measured, rel=0.08)


def test_full_batches_predict_one_that_drains_but_for_one_session_against_another_engine() -> None:
    missed = {(drain.session, drain.drafter) for drain in drains() if not drain.is_close}
    assert len(drains()) == 12 and missed == {("later", "good")}
