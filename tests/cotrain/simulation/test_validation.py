"""Measured systems beside their prediction, within the bounds of docs/measurements/simulator.md; and that page's table."""

import pytest

from benchmarks.simulator_validation import BEGIN, END, PAGE, amdahl, asynchronous, by_length, data, drains, size, text
from pipelines.simulate.report import ERRORS


def test_the_page_holds_the_table() -> None:
    held = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert held.strip() == text(), (
        "python -m benchmarks.simulator_validation writes the table of docs/measurements/simulator.md"
    )


@pytest.mark.parametrize("name", ["paper", "cpu"])
def test_measurements_have_a_source(name: str) -> None:
    tables = [part for part in data(name).values() if any(not isinstance(value, dict) for value in part.values())]
    assert tables and all(part.get("source") or "error" in part for part in tables)


def test_what_the_report_says_of_known_predictions_is_what_they_were() -> None:
    known = [drain.predicted / drain.measured - 1 for drain in drains()]
    assert ERRORS[0] < min(known) < -0.01 and 0.19 < max(known) < ERRORS[1] + 0.005


def test_drafters_at_one_draft_length_compare_by_their_acceptance_length() -> None:
    errors = [predicted / row.speedup - 1 for row, predicted in by_length() if row.k == 3]
    assert len(errors) == 7 and size(errors)[0] < 0.04 and size(errors)[1] < 0.08


def test_steps_follow_from_measured_generation_and_with_lag_from_the_learner() -> None:
    assert len(amdahl()) == 5
    assert all(predicted == pytest.approx(measured, rel=0.034) for _, predicted, measured in amdahl())
    predicted, measured = asynchronous()
    assert predicted == pytest.approx(75.0 - 10.4) and predicted == pytest.approx(measured, rel=0.08)


def test_full_batches_predict_one_that_drains_but_for_one_session_against_another_engine() -> None:
    missed = {(drain.session, drain.drafter) for drain in drains() if not drain.is_close}
    assert len(drains()) == 12 and missed == {("later", "good")}
