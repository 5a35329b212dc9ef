"""Reading a run's record, and what is derived from its columns."""

import json
from pathlib import Path

import pytest

from pipelines.page.record import RunRecord, read_run
from tests.pipelines.page.conftest import row, write_run


def run_with(tmp_path: Path, **columns: list) -> RunRecord:
    """`columns`: a value a step; `__` in a name stands for `/`."""
    steps = range(1, 1 + len(next(iter(columns.values()))))
    rows = [row(step, **{name: values[step - 1] for name, values in columns.items()}) for step in steps]
    return read_run(write_run(tmp_path / "run", rows))


def test_a_metric_that_no_step_measured_is_a_column_of_nan(tmp_path: Path) -> None:
    run = run_with(tmp_path, policy__reward=[None, None])
    assert run.column("policy/reward").isna().tolist() == [True, True]
    assert run.column("no/such").isna().tolist() == [True, True]


def test_a_run_that_was_killed_while_writing_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "killed", [row(1), row(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "policy/rew')
    assert read_run(folder).metrics.index.tolist() == [1, 2]


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
        ("config.json", "{", r"config.json is not JSON"),
        ("metrics.jsonl", '{"step": 1}\n{"step\n', r"metrics.jsonl: a line is not valid JSON"),
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
    assert "policy.model" not in read_run(folder).settings
