"""The MLflow run of a training run, in a real MLflow on sqlite."""

import io
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow import MlflowClient

from cotrain.records import Versions
from cotrain.run import mlflow_store
from cotrain.run.checkpoint import RunState
from cotrain.run.console import Console
from cotrain.run.mlflow_store import check_uri, tracking_uri
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import EXPECTED, Tracker, registered_name
from pipelines.train.run import open_tracker
from tests.empty_store import registered_version

POLICY = "bundled:smollm2-135m-instruct"
TAGS = {"init": "random", "data_fingerprint": "abc"}


@pytest.fixture
def client(mlflow_database):
    uri = f"sqlite:///{mlflow_database}"
    return MlflowClient(uri, uri)


@pytest.fixture
def drafter_folder(tmp_path):
    def build(content=b"weights") -> Path:
        folder = tmp_path / f"drafter-{content.decode()}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(content)
        return folder

    return build


def expected(length):
    """Metrics of a published drafter."""
    return {EXPECTED: length}


def steps_of(client, run_id, name="a"):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def test_a_run_has_its_parameters_metrics_and_status(run_config, client):
    odd = {"max_num_seqs": 4, "additional_config": {"odd key!": "x" * 7000}}
    config = run_config(rollout={"vllm": odd}, drafter=None)
    with Tracker(config) as tracker:
        tracker.log_step(1, {"a": 0.5, "missing": None})
        tracker.log_step(2, {"a": 0.75})
        assert client.get_run(tracker.run_id).info.status == "RUNNING"
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "first"
    assert run.data.params["policy.model"] == "bundled:smollm2-135m-instruct"
    assert len(run.data.params["rollout.vllm.additional_config.odd key_"]) == 6000
    assert steps_of(client, run.info.run_id) == [(1, 0.5), (2, 0.75)]
    assert run.info.artifact_uri.startswith((config.run_root / "mlartifacts" / "cotrain").as_uri())


def test_a_run_says_who_ran_it_on_which_data(run_config, client, monkeypatch):
    monkeypatch.setenv("LOGNAME", "ada")
    with Tracker(run_config()) as tracker:
        pass
    data = client.get_run(tracker.run_id).data
    assert data.tags["mlflow.user"] == "ada"
    assert (data.params["task.name"], data.params["task.size"]) == ("chain_sum", "1000")


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED"), (RuntimeError, "FAILED")]
)
def test_the_status_says_how_a_run_ended(run_config, client, error, status):
    with pytest.raises(error), Tracker(run_config()) as tracker:
        raise error
    assert client.get_run(tracker.run_id).info.status == status


def test_a_killed_run_of_this_folder_does_not_stay_running(run_config, client, tmp_path):
    killed, elsewhere = Tracker(run_config()), Tracker(run_config(name="second"))
    with Tracker(run_config()):
        assert client.get_run(killed.run_id).info.status == "FAILED"
        assert client.get_run(elsewhere.run_id).info.status == "RUNNING"


def test_a_resume_goes_on_without_recording_a_step_twice(run_config, client):
    with Tracker(run_config()) as tracker:
        for step in range(1, 6):
            tracker.log_step(step, {"a": step})
    history = [{"step": step, "a": step} for step in range(1, 4)]
    with Tracker(run_config(steps=9), history=history) as resumed:
        assert resumed.run_id == tracker.run_id
        for step in range(4, 8):
            resumed.log_step(step, {"a": step + 0.5})
    run = client.get_run(tracker.run_id)
    assert steps_of(client, tracker.run_id) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6.5), (7, 7.5)]
    assert run.info.status == "FINISHED"


def test_a_resume_before_the_first_checkpoint_is_not_a_second_run(run_config, client):
    """By the pipeline itself: it begins again, and what MLflow has of its steps already stays."""

    def start(config, resumed, steps):
        with ExitStack() as stack:
            run_dir = stack.enter_context(RunDir(config.run_root, config.name, resumed))
            state = RunState(0, Versions(0, 0), {}, {})
            tracker = stack.enter_context(open_tracker(config, run_dir, state, Console(io.StringIO())))
            for step in range(1, steps + 1):
                tracker.log_step(step, {"a": step + 0.0})
        return tracker.run_id

    first = start(run_config(), False, 2)
    assert start(run_config(steps=9), True, 3) == first
    assert steps_of(client, first) == [(1, 1), (2, 2), (3, 3)] and client.get_run(first).info.status == "FINISHED"
    assert start(run_config(seed=7), True, 1) != first, "parameters of a run in MLflow cannot change"


def test_a_resume_at_another_store_sends_the_whole_history(run_config, client):
    said = []
    history = [{"step": step, "a": step, "b": None} for step in range(1, 4)]
    with Tracker(run_config(), history=history, say=said.append) as tracker:
        pass
    assert "has no run of this folder" in said[0]
    assert steps_of(client, tracker.run_id) == [(1, 1), (2, 2), (3, 3)]


def test_a_published_drafter_is_a_registered_version_with_its_story(run_config, client, drafter_folder):
    with Tracker(run_config()) as tracker:
        tracker.log_drafter(drafter_folder(b"1"), Versions(3, 1), 3, expected(1.5), TAGS)
        tracker.log_drafter(drafter_folder(b"2"), Versions(5, 2), 5, expected(1.25), TAGS)
        assert (registered_version(tracker, 1), registered_version(tracker, 2)) == (1, 2)
    name = "smollm2-135m-instruct-drafter"
    tags = client.get_model_version(name, "2").tags
    lineage = TAGS | {"policy_version": "5", "drafter_version": "2", "parent_version": "1", "run_name": "first"}
    assert tags.items() >= lineage.items() and len(tags["config_hash"]) == 12
    assert tags["expected_acceptance_length"] == "1.2500"
    assert tags["sampling"] == "temperature 1, top_p 1, top_k 0, probabilistic drafts"
    first_version = client.get_model_version(name, "1")
    assert first_version.tags["parent_version"] == "none"
    assert first_version.tags["policy"] == POLICY
    assert int(client.get_model_version_by_alias(name, "serving").version) == 2
    assert int(client.get_model_version_by_alias(name, "best").version) == 1
    model = client.get_logged_model(client.get_model_version(name, "1").source.removeprefix("models:/"))
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [(EXPECTED, 1.5, 3)]
    outputs = client.get_run(tracker.run_id).outputs.model_outputs
    assert sorted(output.step for output in outputs) == [3, 5]


def test_the_parent_of_a_drafter_is_the_one_before_it_that_was_registered(run_config, client, drafter_folder):
    """Version 2 was refused by an engine, so nobody has ever served it."""
    with Tracker(run_config()) as tracker:
        for number in (1, 3):
            folder, reason = drafter_folder(bytes([number])), {"decision": f"gain {number}"}
            tracker.log_drafter(folder, Versions(number, number), number, {}, TAGS | reason)
            assert registered_version(tracker, number)
    last = client.get_model_version("smollm2-135m-instruct-drafter", "2")
    assert (last.tags["drafter_version"], last.tags["parent_version"]) == ("3", "1")
    assert last.tags["decision"] == "gain 3"


def test_best_is_the_best_of_one_run_since_its_last_roll_back(run_config, client, drafter_folder):
    def version_of(alias):
        return int(client.get_model_version_by_alias("smollm2-135m-instruct-drafter", alias).version)

    def publish(tracker, number, metrics):
        folder = drafter_folder(bytes([number]))
        tracker.log_drafter(folder, Versions(number, number), number, metrics, TAGS)
        assert registered_version(tracker, number)

    with Tracker(run_config()) as tracker:
        best = []
        for number, length in enumerate([1.5, 2.0, 1.75], start=1):
            publish(tracker, number, expected(length))
            best.append(version_of("best"))
        assert best == [1, 2, 2]
        publish(tracker, 4, {})  # the weights of 2 serve again
        assert version_of("best") == 4
    with Tracker(run_config(), history=[{"step": 4}]) as resumed:
        publish(resumed, 5, expected(1.75))
        publish(resumed, 6, expected(1.5))
    assert (version_of("best"), version_of("serving")) == (5, 6)
    with Tracker(run_config(name="second")) as second:
        publish(second, 7, expected(1.25))
    assert version_of("best") == version_of("serving") == 7, "versions of another run are not compared"


def test_a_resumed_run_registers_an_equal_drafter_once_and_another_anew(run_config, client, drafter_folder):
    with Tracker(run_config()) as tracker:
        tracker.log_drafter(drafter_folder(b"1"), Versions(1, 1), 1, {}, TAGS)
        tracker.log_drafter(drafter_folder(b"2"), Versions(2, 2), 2, {}, TAGS)
    with Tracker(run_config(), history=[{"step": 2}]) as resumed:
        resumed.log_drafter(drafter_folder(b"1"), Versions(1, 1), 1, {}, TAGS)
        assert registered_version(resumed, 1) == 1
        assert int(client.get_model_version_by_alias(resumed.registered_model, "serving").version) == 1
        assert int(client.get_model_version_by_alias(resumed.registered_model, "best").version) == 1
        resumed.log_drafter(drafter_folder(b"new"), Versions(2, 2), 2, {}, TAGS)
        assert registered_version(resumed, 2) == 3
    assert int(client.get_model_version_by_alias(resumed.registered_model, "best").version) == 3


def test_drafters_are_not_stored_when_switched_off(run_config, client, drafter_folder):
    with Tracker(run_config(tracking={"log_drafters": False})) as tracker:
        tracker.log_drafter(drafter_folder(), Versions(1, 1), 1, {}, TAGS)
    assert client.search_registered_models() == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B-drafter"),
        ("bundled:smollm2-135m-instruct", "smollm2-135m-instruct-drafter"),
        ("/models/my model:v2", "my_model_v2-drafter"),
    ],
)
def test_the_registered_name_comes_from_the_policy(model, name):
    assert registered_name(model, "") == name
    assert registered_name(model, "0123456789") == name.replace("-drafter", "-01234567-drafter")


def test_the_default_store_is_an_absolute_sqlite_path_in_the_run_root(run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tracking_uri(run_config(run_root="runs")) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracking_uri(run_config(tracking={"uri": "sqlite:///my.db"})) == f"sqlite:///{tmp_path}/my.db"


@pytest.fixture
def port():
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_server_that_is_not_there_is_an_error_within_seconds(run_config, port, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free_port = closed.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"tracking\.uri: no answer from .*refused.*leave tracking\.uri out"):
        Tracker(run_config(tracking={"uri": f"http://127.0.0.1:{free_port}"}))
    monkeypatch.setattr(mlflow_store, "HEALTH_TIMEOUT_S", 0.3)
    with pytest.raises(ValueError, match=r"tracking\.uri: no answer from .*timed out"):
        Tracker(run_config(tracking={"uri": f"http://127.0.0.1:{port}"}))
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "localhost:5000"])
def test_what_is_no_store_is_refused(uri):
    with pytest.raises(ValueError, match=r"tracking\.uri: .* is neither"):
        check_uri(uri)
