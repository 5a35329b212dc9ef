"""COTRAIN_RUN_ROOT: every command that looks for runs, drafters or their store looks there, and an option or field wins."""

from pathlib import Path

import pytest

from cotrain.config.load import load_config
from cotrain.config.sidecar import load_sidecar
from cotrain.run.mlflow_store import tracking_uri
from cotrain.run.run_dir import resume_arguments
from pipelines import cli

SMOKE = str(Path(__file__).parents[2] / "configs" / "smoke.toml")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run root that the variable names, with a run in it. The working folder has no runs."""
    root = tmp_path / "big disk"
    (root / "mine").mkdir(parents=True)
    (root / "mine" / "config.json").write_text(load_config([SMOKE], ["name=mine"]).model_dump_json())
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COTRAIN_RUN_ROOT", str(root))
    return root


def test_runs_are_written_there_unless_the_field_says_otherwise(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config([SMOKE]).run_root == load_sidecar([], ["model=m"]).run_root == root
    assert load_config([SMOKE], ["run_root=elsewhere"]).run_root == Path("elsewhere")
    assert tracking_uri(load_config([SMOKE])) == f"sqlite:///{root}/mlflow.db"
    monkeypatch.delenv("COTRAIN_RUN_ROOT")
    assert load_config([SMOKE]).run_root == Path("runs")
    monkeypatch.setenv("COTRAIN_RUN_ROOT", "")
    assert load_config([SMOKE]).run_root == Path("runs")


def test_a_run_is_resumed_from_there(root: Path, tmp_path: Path) -> None:
    assert load_config([], ["steps=9"], "mine").run_root == root
    assert resume_arguments(root, "mine") == "--resume mine"
    assert resume_arguments(tmp_path, "mine") == f"--resume mine run_root={tmp_path}"


@pytest.mark.parametrize(
    "arguments", [["report", "yours"], ["export", "yours", "out"], ["simulate", "--run", "yours"]], ids=lambda a: a[0]
)
def test_runs_are_looked_for_there(root: Path, arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert cli.main(arguments) == 2
    assert f"here or in {root}, which holds mine" in capsys.readouterr().err
    assert cli.main([argument.replace("yours", "mine") for argument in arguments]) == 2
    assert "is neither" not in capsys.readouterr().err


def test_drafters_are_looked_for_there_and_it_is_said(
    root: Path, empty_mlflow_database: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["drafters", "list"]) == 0
    assert f"No drafters yet at sqlite:///{root}/mlflow.db" in capsys.readouterr().out
    (root / "mlflow.db").write_bytes(empty_mlflow_database.read_bytes())
    assert cli.main(["bench", "--model", "tiny:llama", "--drafter", "models:/none", "--k", "1"]) == 2
    assert f"no drafter 'models:/none' at sqlite:///{root}/mlflow.db" in capsys.readouterr().err
    assert cli.main(["drafters", "list", "--uri", "sqlite:///elsewhere.db"]) == 0
    assert f"No drafters yet at sqlite:///{Path.cwd()}/elsewhere.db" in capsys.readouterr().out
