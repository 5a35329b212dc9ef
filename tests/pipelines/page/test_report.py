"""`cotrain report`, and the report that `cotrain train` writes at its end."""

import io
from pathlib import Path

import pytest

from cotrain.config.load import read_config
from cotrain.run.console import Console, RunSummary, summary_lines
from cotrain.run.run_dir import RunDir
from pipelines.cli import main
from pipelines.page.page import REPORT
from pipelines.train.joint import _write_report
from tests.pipelines.page.conftest import arm, write_run, write_study


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["first", "runs/first"])
def test_a_run_by_name_or_folder(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root / "first", [{"step": 1}])
    assert main(["report", name]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == Path("runs/first/report/report.html")
    assert "cotrain run" in page.read_text()


def test_a_study(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(root / "study", [arm("generic", "generic", True)], {})
    assert main(["report", "study"]) == 0
    assert "cotrain study" in Path(capsys.readouterr().out.strip()).read_text()
    assert (root / "study" / REPORT / "table.csv").is_file()


def test_another_run_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "elsewhere" / "first", [{"step": 1}])
    assert main(["report", "first", "--run-root", str(tmp_path / "elsewhere")]) == 0
    assert "elsewhere/first/report/report.html" in capsys.readouterr().out


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
    with RunDir.create(root, "first") as run_dir:
        assert _write_report(run_dir, Console(stream)) is None
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().startswith("report not written (")
    assert f"cotrain report {root / 'first'}" in stream.getvalue()


def test_a_finished_run_gets_its_report_and_names_it(root: Path) -> None:
    write_run(root / "first", [{"step": 1}])
    (root / "first" / "run.lock").touch()
    with RunDir(root, "first") as run_dir:
        page = _write_report(run_dir, Console(io.StringIO()))
        assert page is not None and page.is_file()
        summary = RunSummary(stopped_early=True, greedy_identical=None, drafter_uri=None, next_commands=(), report=page)
        lines = summary_lines(read_config(run_dir.config), run_dir, [{"step": 1}], summary)
    assert f"  report       {page}" in lines
