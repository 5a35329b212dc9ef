"""`cotrain report`, and the report that `cotrain train` writes at its end."""

import io
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from cotrain.config.load import read_config
from cotrain.records import Versions
from cotrain.run.console import Console
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from pipelines.cli import main
from pipelines.page.page import REPORT
from pipelines.train.run import _write_report, finish
from tests.pipelines.page.conftest import arm, row, write_run, write_study


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize(("name", "folder"), [("first", "runs"), ("runs/first", "runs"), ("other/first", "other")])
def test_a_run_by_name_or_folder(root: Path, name: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path(folder) / "first", [{"step": 1}])
    assert main(["report", name]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == Path(folder) / "first" / "report" / "report.html"
    assert "a cotrain run" in page.read_text()


def test_a_study(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(root / "study", [arm("generic")], {})
    assert main(["report", "study"]) == 0
    assert "a cotrain study" in Path(capsys.readouterr().out.strip()).read_text()
    assert (root / "study" / REPORT / "table.csv").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("firts", "here or in runs, which holds first; did you mean first?"),
        ("other", "RUN|STUDY: 'other' is neither a run (with config.json) nor a study (with study.json)"),
    ],
)
def test_what_is_neither_run_nor_study_is_refused(
    root: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(root / "first", [{"step": 1}])
    (root / "other").mkdir()
    assert main(["report", name]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_metrics_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root / "first", [])
    assert main(["report", "first"]) == 2
    assert "cotrain: runs/first/metrics.jsonl: no metrics yet" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_fail_a_finished_run(root: Path) -> None:
    stream = io.StringIO()
    with RunDir(root, "first", resumed=False) as run_dir:
        assert _write_report(run_dir, Console(stream)) is None
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().startswith("report not written (")
    assert f"cotrain report {root / 'first'}" in stream.getvalue()


@pytest.mark.parametrize(("steps", "finished"), [(1, True), (2, False)])
def test_the_end_of_a_run_names_its_report_and_what_to_do_next(root: Path, steps: int, finished: bool) -> None:
    write_run(root / "first", [row(1)], steps=steps)
    told = ended_run(root, finished)
    lines = told.splitlines()
    assert lines[1] == f"{'Done' if finished else 'Stopped'}: 1 of {steps} steps in 30.0s, 1,000 tokens generated"
    assert lines[2].startswith("  reward       0.10 -> 0.10   (")
    assert "; greedy output identical" in " ".join(told.split()) and "  speculation  k=2 (fixed)" in lines
    assert max(map(len, lines)) <= 120
    at = lines.index("")
    at = lines.index("", at + 1)
    assert lines[at + 1 : at + 3] == ["  run folder   runs/first", "  report       runs/first/report/report.html"]
    assert (root / "first" / "report" / "report.md").is_file()
    assert ("  drafter      runs/first/drafter; serves in stock vLLM as it is" in lines) is finished
    assert ("  registered   models:/llama-drafter@serving in MLflow" in lines) is finished
    assert ("  go on               cotrain train --resume first" in lines) is not finished
    assert ("cotrain bench --model tiny:llama --drafter runs/first/drafter" in told) is finished
    assert "drafter.init" not in told, "its policy has moved away from the one that another run starts with"
    link = root / "first" / "drafter"
    assert link.is_symlink() is finished and (not finished or os.readlink(link) == "drafters/v0001")
    assert "  look at the curves" in told


def test_a_run_that_was_stopped_before_its_first_step_says_how_to_go_on(root: Path) -> None:
    write_run(root / "first", [])
    assert ended_run(root, finished=False) == (
        "\nStopped before the first step. Go on with: cotrain train --resume first\n"
    )


def ended_run(root: Path, finished: bool) -> str:
    """What the end of a run prints."""
    stream, tracker = io.StringIO(), Mock(registered_model="llama-drafter", uri="sqlite:///mlflow.db")
    (root / "first" / "run.lock").touch()
    with RunDir(Path("runs"), "first") as run_dir:
        controller = Mock(config=read_config(run_dir.config), run_dir=run_dir, mode=None, versions=Versions(1, 1))
        controller.step = len(read_rows(run_dir.metrics))
        controller.records = Mock(tracker=tracker, console=Console(stream))
        controller.roles.engines.call_all.return_value = {0: "k=2 (fixed)", 1: "k=2 (fixed)"}
        finish(controller, finished, Mock(passed=True))
    tracker.finish.assert_called_once_with("FINISHED" if finished else "KILLED")
    return stream.getvalue()
