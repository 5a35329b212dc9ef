"""What MLflow does not take, with a real MLflow on sqlite and a port on which no server listens."""

import time
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from mlflow import MlflowClient

from cotrain.process.cluster import free_port
from cotrain.publish.decision import DrafterEvent
from cotrain.records import Versions
from cotrain.run import outbox
from cotrain.run.rows import RowFile
from cotrain.run.step_metrics import metrics_of
from cotrain.run.tracking import Tracker
from tests.speculation_counts import counts

NAME = "smollm2-135m-instruct-drafter"
TAGS = {"init": "random", "data_fingerprint": "abc"}


@pytest.fixture
def client(mlflow_database):
    uri = f"sqlite:///{mlflow_database}"
    return MlflowClient(uri, uri)


@pytest.fixture
def drafter(tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def steps_of(client, tracker):
    return [(metric.step, metric.value) for metric in client.get_metric_history(tracker.run_id, "a")]


@contextmanager
def down(tracker, monkeypatch):
    """The store of a tracker is a server that has gone."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with monkeypatch.context() as planted:
        address = f"http://127.0.0.1:{free_port()}"
        planted.setattr(tracker, "_client", MlflowClient(address, address))
        yield


def test_an_outage_is_said_once_and_made_up_for(run_config, client, drafter, monkeypatch):
    said = []
    with Tracker(run_config(), say=said.append) as tracker:
        tracker.log_step(1, {"a": 1})
        wait_until(lambda: steps_of(client, tracker) == [(1, 1)])
        with down(tracker, monkeypatch):
            for step in (2, 3):
                tracker.log_step(step, {"a": step})
            registered = tracker.log_drafter(drafter, Versions(2, 1), 2, {}, TAGS)
            wait_until(lambda: tracker.behind == "mlflow 2 behind")
            tracker.log_step(4, {"a": 4})
            wait_until(lambda: tracker.behind == "mlflow 3 behind")
        tracker.log_step(5, {"a": 5})
        assert registered.result(timeout=60) == 1
        wait_until(lambda: tracker.behind == "")
    assert steps_of(client, tracker) == [(step, step) for step in range(1, 6)]
    assert len(said) == 2 and said[0].startswith("MLflow takes no metrics (NewConnectionError(")
    assert said[0].endswith("; the run goes on, each step tries again") and "Connection refused" in said[0]
    assert said[1] == "MLflow takes metrics again, and gets those that it has missed"


def test_a_long_outage_fills_no_memory_and_a_resume_fills_the_gap(run_config, client, monkeypatch):
    monkeypatch.setattr(outbox, "MOST_WAITING", 3)
    said, history = [], [{"step": step, "a": step} for step in range(1, 11)]
    with Tracker(run_config(), say=said.append) as tracker:
        tracker.log_step(1, {"a": 1})
        wait_until(lambda: steps_of(client, tracker) == [(1, 1)])
        with down(tracker, monkeypatch):
            for step in range(2, 10):
                tracker.log_step(step, {"a": step})
            wait_until(lambda: tracker._outbox.dropped == 5)
        tracker.log_step(10, {"a": 10})
    assert [step for step, _ in steps_of(client, tracker)] == [1, 7, 8, 9, 10]
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    assert "did not take everything after step 1" in said[-1] and "--resume first run_root=" in said[-1]
    with Tracker(run_config(), history=history) as resumed:
        pass
    assert resumed.run_id == tracker.run_id and {step for step, _ in steps_of(client, tracker)} == {*range(1, 11)}


def test_a_store_that_is_down_at_the_end_is_said(run_config, mlflow_database, monkeypatch):
    said = []
    tracker = Tracker(run_config(), say=said.append)
    with down(tracker, monkeypatch):
        tracker.log_step(1, {"a": 1})
        tracker.finish()
    assert "it lacks step 1, the status FINISHED. Nothing is lost" in said[-1] and "--resume first" in said[-1]


def test_a_version_that_was_deleted_holds_up_nothing_else(run_config, client, drafter):
    said = []
    with Tracker(run_config(), say=said.append) as tracker:
        assert tracker.log_drafter(drafter, Versions(1, 1), 1, {}, TAGS).result(60) == 1
        client.delete_model_version(NAME, "1")
        for step in (2, 3):
            served = {"versions/drafter": 1} | metrics_of(counts(100, 1, (50,)))
            tracker.log_step(step, {"a": step} | served)
        tracker.set_tags({"host": "mine"})
        assert tracker.log_drafter(drafter, Versions(3, 2), 3, {}, TAGS).result(60) == 2
    run = client.get_run(tracker.run_id)
    assert steps_of(client, tracker) == [(2, 2), (3, 3)]
    assert run.data.tags["host"] == "mine" and run.info.status == "FINISHED"
    assert run.data.tags["cotrain.failures"].startswith("3 failures, the last one of the acceptance of drafter 1: ")
    assert len(said) == 2 and said[0].startswith("MLflow does not take the acceptance of drafter 1 (")
    assert "; restore it in MLflow); the run goes on" in said[0]
    assert "it lacks the acceptance of drafter 1. Nothing is lost" in said[1]


@pytest.mark.parametrize("mended", [False, True])
def test_artifacts_that_cannot_be_written_hold_up_nothing_else(run_config, client, drafter, tmp_path, mended):
    """In place of the folder of artifacts there is a file, which stops root too."""
    said, config = [], run_config()
    blocked = config.run_root / "mlartifacts"
    blocked.touch()
    log = RowFile(tmp_path / "decisions.jsonl")
    event = DrafterEvent(1, "kept back", 0, "no gain is certain")
    log.write(1, asdict(event))
    with Tracker(config, say=said.append) as tracker:
        tracker.log_decisions(log.path, event)
        registered = tracker.log_drafter(drafter, Versions(1, 1), 1, {}, TAGS)
        for step in (1, 2, 3):
            tracker.log_step(step, {"a": step})
        wait_until(lambda: len(steps_of(client, tracker)) == 3)
        if mended:
            blocked.unlink()
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED" and run.data.tags["drafter.last_reason"] == "no gain is certain"
    assert [text.partition(" (")[0] for text in said[:2]] == [
        "MLflow does not take decisions.jsonl",
        "MLflow does not take drafter 1",
    ]
    assert all(f"; see to {blocked}" in text for text in said[:2])
    if mended:
        assert registered.result(60) == 1 and len(said) == 2
        assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["decisions.jsonl"]
    else:
        assert not registered.done() and "it lacks decisions.jsonl, drafter 1. Nothing is lost" in said[2]


def test_a_drafter_that_is_sent_late_does_not_become_the_serving_one(run_config, client, drafter, tmp_path):
    with Tracker(run_config()) as tracker:
        late = tracker.log_drafter(tmp_path / "moved", Versions(1, 1), 1, {}, TAGS)
        assert tracker.log_drafter(drafter, Versions(2, 2), 2, {}, TAGS).result(60) == 1
        drafter.rename(tmp_path / "moved")
    assert late.result(60) == 2
    assert int(client.get_model_version_by_alias(NAME, "serving").version) == 1
