"""Reading a run's record, and which numbers of different steps belong together."""

import json
from pathlib import Path

import pytest

from pipelines.page.record import expected_of_served, from_to, read_run, served_lag, swapped
from tests.pipelines.page.conftest import row, write_run


def test_expected_is_of_the_drafter_that_served() -> None:
    """Step 2 published nothing, so that step 3 was not served by what step 2 scored; step 5 follows a gap."""
    rows = [row(1), row(2, drafter__published=0.0), row(3), row(5)]
    assert expected_of_served(rows) == [None, pytest.approx(1.2), None, None]


def test_swaps_are_found_across_a_step_that_lost_its_version() -> None:
    rows = [row(i, versions__drafter=version) for i, version in enumerate([0, 0, None, 1, 1, 2], start=1)]
    assert swapped(rows) == [3, 5]


def test_lag_counts_from_the_rollouts_before_the_swap() -> None:
    versions = [0, 0, 0, 1, 1, 1]
    rows = [row(i, versions__drafter=version) for i, version in enumerate(versions, start=1)]
    assert served_lag(rows) == [0, 1, 2, 1, 2, 3]


def test_lag_of_a_judged_drafter_counts_from_the_rollouts_before_its_judgement() -> None:
    rows = [row(i, versions__drafter=version) for i, version in enumerate([0, 0, 1, 1, 2], start=1)]
    rows[1]["gate/publish"] = 1.0
    rows[3]["drafter/rolled_back"] = 1.0
    assert served_lag(rows) == [0, 1, 2, 3, None]


def test_lag_of_a_frozen_policy_is_none() -> None:
    assert served_lag([row(i, versions__policy=0) for i in (1, 2, 3)]) == [0, 0, 0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([None, 1.0, 2.0, None, 4.0, 5.0, 7.0, 9.0], (1.5, 8.0)),
        ([3.0], (3.0, 3.0)),
        ([None, None], None),
    ],
)
def test_from_to_is_over_measured_steps(values: list[float | None], expected: tuple[float, float] | None) -> None:
    assert from_to(values, 3) == expected


def test_a_run_that_was_killed_while_writing_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "killed", [row(1), row(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "policy/rew')
    assert read_run(folder).steps == [1, 2]


@pytest.mark.parametrize("rows", [[], None])
def test_a_run_without_metrics_is_refused(tmp_path: Path, rows: list | None) -> None:
    folder = write_run(tmp_path / "new", [])
    if rows is None:
        (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"new/metrics.jsonl: no metrics yet; a report needs one finished step"):
        read_run(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", r"config.json: not valid JSON"),
        ("config.json", "[]", r"config.json: holds a list, not an object"),
        ("metrics.jsonl", '{"step": 1}\n{"step\n', r"metrics.jsonl: a line is not valid JSON"),
        ("metrics.jsonl", '{"policy/reward": 1}\n', r"metrics.jsonl: a line has no 'step'"),
        ("provenance.json", "{", r"provenance.json: not valid JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = write_run(tmp_path / "broken", [row(1)])
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def test_a_configuration_of_another_version_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old", [row(1)])
    (folder / "config.json").write_text(json.dumps({"name": "old", "field_of_the_past": 1}))
    assert read_run(folder).setting("policy.model") is None


def test_what_was_expected_of_the_serving_drafter_is_taken_as_it_is() -> None:
    rows = [row(1, rollout__expected_acceptance_length=1.5), row(2), row(3, rollout__expected_acceptance_length=1.7)]
    assert expected_of_served(rows) == [1.5, None, 1.7]
