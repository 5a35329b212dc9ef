"""What MLflow does not take, with a real MLflow on sqlite and a port on which no server listens."""

import time
from contextlib import contextmanager

import pytest
from mlflow import MlflowClient, MlflowException

from cotrain.process.cluster import free_port
from cotrain.records import Versions
from cotrain.run import tracking
from cotrain.run.tracking import Tracker
from tests.empty_store import registered_version

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
            tracker.log_drafter(drafter, Versions(2, 1), 2, {}, TAGS)
            wait_until(lambda: tracker.behind == "mlflow 2 behind")
            tracker.log_step(4, {"a": 4})
            wait_until(lambda: tracker.behind == "mlflow 3 behind")
        tracker.log_step(5, {"a": 5})
        assert registered_version(tracker, 1) == 1
        wait_until(lambda: tracker.behind == "")
    assert steps_of(client, tracker) == [(step, step) for step in range(1, 6)]
    assert len(said) == 2 and said[0].startswith("MLflow takes no metrics (NewConnectionError(")
    assert said[0].endswith("; the run goes on, each step tries again") and "Connection refused" in said[0]
    assert said[1] == "MLflow takes metrics again, and gets those that it has missed"


def test_what_failed_just_before_the_store_came_back_is_sent(run_config, client, monkeypatch):
    said, failures = [], [MlflowException("Connection reset by peer")]
    with Tracker(run_config(), say=said.append) as tracker:
        log_batch = tracker._client.log_batch

        def broken_once(*args, **options):
            if failures:
                raise failures.pop()
            log_batch(*args, **options)

        monkeypatch.setattr(tracker._client, "log_batch", broken_once)
        for step in (1, 2):
            tracker.log_step(step, {"a": step})
    assert steps_of(client, tracker) == [(1, 1), (2, 2)] and said == []


def test_a_long_outage_fills_no_memory_and_a_resume_fills_the_gap(run_config, client, monkeypatch):
    monkeypatch.setattr(tracking, "MOST_WAITING", 3)
    said, history = [], [{"step": step, "a": step} for step in range(1, 11)]
    with Tracker(run_config(), say=said.append) as tracker:
        tracker.log_step(1, {"a": 1})
        wait_until(lambda: steps_of(client, tracker) == [(1, 1)])
        with down(tracker, monkeypatch):
            for step in range(2, 10):
                tracker.log_step(step, {"a": step})
            wait_until(lambda: tracker.behind == "mlflow 8 behind" and len(tracker._outbox._waiting) == 3)
        tracker.log_step(10, {"a": 10})
    assert [step for step, _ in steps_of(client, tracker)] == [1, 7, 8, 9, 10]
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    lacks = "it lacks step 2, step 3, step 4 and 2 more. Nothing is lost: steps are in metrics.jsonl (--resume first"
    assert lacks in said[-1] and "run_root=" in said[-1]
    with Tracker(run_config(), history=history) as resumed:
        pass
    assert resumed.run_id == tracker.run_id
    assert sorted(step for step, _ in steps_of(client, tracker)) == [*range(1, 11)]


def test_a_store_that_is_down_at_the_end_is_said(run_config, mlflow_database, monkeypatch):
    said = []
    tracker = Tracker(run_config(), say=said.append)
    with down(tracker, monkeypatch):
        tracker.log_step(1, {"a": 1})
        tracker.finish()
    assert "it lacks step 1, the status FINISHED. Nothing is lost" in said[-1] and "--resume first" in said[-1]


def test_a_drafter_that_is_refused_holds_up_nothing_else(run_config, client, drafter, tmp_path):
    said = []
    with Tracker(run_config(), say=said.append) as tracker:
        for number in (1, 2):
            tracker.log_drafter(tmp_path / "gone", Versions(number, number), 1, {}, TAGS)
            tracker.log_step(number, {"a": number})
        tracker.log_drafter(drafter, Versions(3, 3), 3, {}, TAGS)
        assert registered_version(tracker, 3) == 1
    run = client.get_run(tracker.run_id)
    assert steps_of(client, tracker) == [(1, 1), (2, 2)]
    assert run.info.status == "FINISHED"
    assert run.data.tags["cotrain.failures"].startswith("2 failures, the last one of drafter 2: ")
    assert len(said) == 2 and said[0].startswith("MLflow does not take drafter 1 (")
    assert f"; see to {tmp_path}/gone/" in said[0] and "); the run goes on without it" in said[0]
    assert "it lacks drafter 1, drafter 2. Nothing is lost" in said[1]


def test_artifacts_that_cannot_be_written_hold_up_nothing_else(run_config, client, drafter, tmp_path):
    """In place of the folder of artifacts there is a file, which stops root too."""
    said, config = [], run_config()
    blocked = config.run_root / "mlartifacts"
    blocked.touch()
    with Tracker(config, say=said.append) as tracker:
        tracker.log_drafter(drafter, Versions(1, 1), 1, {}, TAGS)
        for step in (1, 2, 3):
            tracker.log_step(step, {"a": step})
        wait_until(lambda: len(steps_of(client, tracker)) == 3)
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    assert said[0].startswith("MLflow does not take drafter 1 (") and f"; see to {blocked}" in said[0]
    assert client.search_model_versions() == [] and "it lacks drafter 1. Nothing is lost" in said[1]
