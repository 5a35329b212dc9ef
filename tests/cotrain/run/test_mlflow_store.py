"""Which MLflow store a run uses, and stores that are odd: real sqlite files, and a server that wants a login."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cotrain.records import Versions
from cotrain.run.mlflow_store import connect, default_uri, tracking_uri
from cotrain.run.registry import list_drafters, pull_drafter
from cotrain.run.tracking import Tracker
from pipelines.ablate.plan import load_study
from pipelines.preflight import find_problems
from tests.empty_store import registered_version

CREATE = "import sys; from cotrain.run.mlflow_store import connect; connect(f'sqlite:///{sys.argv[1]}')"
TAGS = {"init": "random", "data_fingerprint": "abc"}


def write_drafter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_field_wins_over_the_variable_and_that_over_the_run_root(run_config, tmp_path, monkeypatch):
    own = run_config(tracking={"uri": "sqlite:///own.db"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/shared.db")
    assert tracking_uri(run_config()) == default_uri() == f"sqlite:///{tmp_path}/shared.db"
    assert tracking_uri(own) == f"sqlite:///{Path.cwd()}/own.db"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking_uri(run_config()) == f"sqlite:///{tmp_path}/runs/mlflow.db"


def test_a_study_records_where_the_variable_says(tmp_path, monkeypatch):
    study = Path(__file__).parents[3] / "configs" / "studies" / "order" / "study.toml"
    assert load_study(study, [f"folder={tmp_path}"]).shared.tracking.uri == f"sqlite:///{tmp_path}/order/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert tracking_uri(load_study(study, [f"folder={tmp_path}"]).shared) == "http://127.0.0.1:5000"


def test_a_store_that_the_variable_names_wrongly_is_refused_by_its_name(run_config, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere")
    lines = find_problems(run_config(), quick=True)
    assert any(line.startswith("MLFLOW_TRACKING_URI: 'nowhere' is neither http(s)://") for line in lines), lines


def test_what_is_connected_to_does_not_become_the_default_of_other_runs(run_config, mlflow_database, monkeypatch):
    """MLflow puts the store into the environment, where later runs and child processes would find it."""
    for given in (None, "http://127.0.0.1:5000"):
        if given:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
        for _ in range(2):
            connect(f"sqlite:///{mlflow_database}")
            assert os.environ.get("MLFLOW_TRACKING_URI") == given


@pytest.mark.parametrize("name", ["a%20b", "what?"])
def test_a_run_root_with_signs_that_mean_something_in_a_uri_is_refused(run_config, tmp_path, name):
    uri = tracking_uri(run_config(run_root=tmp_path / name))
    with pytest.raises(
        ValueError, match=r"tracking\.uri: MLflow cannot use a path with % or \? .*set .* run_root elsewhere"
    ):
        connect(uri)


def test_a_run_root_with_a_space_and_a_hash_is_none_of_these(run_config, empty_mlflow_database, tmp_path):
    root = tmp_path / "a b #1"
    root.mkdir()
    shutil.copy(empty_mlflow_database, root / "mlflow.db")
    with Tracker(run_config(run_root=root)) as tracker:
        tracker.log_step(1, {"a": 0.5})
        tracker.log_drafter(write_drafter(tmp_path / "d"), Versions(1, 1), 1, {}, TAGS)
        assert registered_version(tracker, 1) == 1
    with sqlite3.connect(root / "mlflow.db") as database:
        assert database.execute("SELECT value FROM metrics WHERE key = 'a'").fetchall() == [(0.5,)]
    assert len(list((root / "mlartifacts").rglob("model.safetensors"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b #1", "d"], "and nothing beside it"


def test_drafters_are_found_among_1005_registered_models(run_config, mlflow_database, tmp_path):
    """MLflow gives a thousand models at once, in the order of their names."""
    drafter = write_drafter(tmp_path / "drafter")
    config = run_config(policy={"model": "/models/zephyr"})
    with Tracker(config) as tracker:
        tracker.log_drafter(drafter, Versions(1, 1), 1, {}, TAGS)
        assert registered_version(tracker, 1) == 1
    with sqlite3.connect(mlflow_database) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(registered_models)")]
        (row,) = database.execute(f"SELECT {', '.join(columns)} FROM registered_models").fetchall()
        at = columns.index("name")
        rows = [(*row[:at], f"model-{i:04d}", *row[at + 1 :]) for i in range(1005)]
        database.executemany(f"INSERT INTO registered_models VALUES ({', '.join('?' * len(columns))})", rows)
    uri = tracking_uri(config)
    assert [(row.name, row.aliases) for row in list_drafters(uri)] == [("zephyr-drafter", ["best", "serving"])]
    assert int(pull_drafter(uri, "zephyr-drafter", tmp_path / "pulled").version) == 1


@pytest.fixture
def locked_server():
    """A server that answers its health check and wants a login for all else, in the words of MLflow's own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 401)
            self.end_headers()
            if self.path != "/health":
                guide = "https://mlflow.org/docs/latest/auth/index.html#authenticating-to-mlflow"
                self.wfile.write(f"You are not authenticated. Please see {guide} on how to authenticate.".encode())

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_wants_a_login_says_which_variables_give_it(locked_server):
    with pytest.raises(ValueError, match="cannot be used") as raised:
        connect(locked_server)
    text, _, fix = str(raised.value).rpartition("; ")
    assert fix == "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    assert "error code 401" in text and text.endswith(" ...") and not text.endswith("authen ...")


def test_a_database_whose_creation_was_killed_is_created_again(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    process = subprocess.Popen([sys.executable, "-c", CREATE, str(database)])
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size > 2**15 for file in tmp_path.rglob("mlflow.db")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not database.exists()  # MLflow opens one that was cut off in the wrong moment never again
    connect(f"sqlite:///{database}").search_experiments()
    assert [file.name for file in tmp_path.iterdir()] == ["mlflow.db"]
