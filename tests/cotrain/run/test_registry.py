"""The registry of a real MLflow on sqlite."""

import shutil

import pytest

from cotrain.config.schema import RunConfig
from cotrain.records import Versions
from cotrain.run.checkpoint import model_fingerprints
from cotrain.run.registry import (
    drafter_folder,
    drafter_table,
    first_drafter,
    list_drafters,
    pull_drafter,
    pull_starts,
)
from cotrain.run.tracking import EXPECTED, Tracker

NAME = "smollm2-135m-instruct-drafter"


@pytest.fixture(scope="module")
def store(empty_mlflow_database, tmp_path_factory):
    """A folder with two versions of one drafter, in MLflow and as folders: 1 is best, 2 is serving."""
    root = tmp_path_factory.mktemp("store")
    shutil.copy(empty_mlflow_database, root / "mlflow.db")
    config = RunConfig(
        name="first",
        steps=1,
        run_root=root,
        policy={"model": "bundled:smollm2-135m-instruct"},
        task={"type": "reasoning_gym", "name": "chain_sum"},
    )
    with Tracker(config) as tracker:
        for version, length in ((1, 2.0), (2, 1.5)):
            folder = root / f"v{version}"
            folder.mkdir()
            (folder / "config.json").write_text(f'{{"version": {version}}}')
            (folder / "model.safetensors").write_bytes(b"weights" * version)
            tags = {"init": "random", "data_fingerprint": "abc"}
            tracker.log_drafter(folder, Versions(10 + version, version), version, {EXPECTED: length}, tags)
    return root


@pytest.fixture
def uri(store):
    return f"sqlite:///{store}/mlflow.db"


def test_list(uri):
    rows = list_drafters(uri)
    assert [(int(row.version), row.aliases, row.tags["policy_version"]) for row in rows] == [
        (2, ["serving"], "12"),
        (1, ["best"], "11"),
    ]
    head, *lines = drafter_table(rows, uri).splitlines()
    line = next(line for line in lines if "best" in line)
    assert line.split()[:7] == [NAME, "1", "best", "11", "1", "2.0000", "first"], head


def test_an_sqlite_file_that_is_not_there_holds_none_and_is_not_made(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert f"No drafters yet at {uri}" in drafter_table(list_drafters(uri), uri)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "version"),
    [(NAME, 2), (f"{NAME}@serving", 2), (f"{NAME}@best", 1), (f"{NAME}/1", 1), (f"models:/{NAME}@best", 1)],
)
def test_pull(uri, tmp_path, spec, version):
    folder = tmp_path / "out" / "drafter"
    assert int(pull_drafter(uri, spec, folder).version) == version
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights" * version
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]


def test_starts_are_the_best_of_each_registered_model(uri, tmp_path, monkeypatch, caplog):
    start = tmp_path / "starts" / f"{NAME}-1"
    with monkeypatch.context() as patched:
        patched.setattr("cotrain.run.registry.file_digest", lambda path: "other")
        pull_starts(uri, start.parent)
    assert "differs from its record" in caplog.text and not start.exists(), "the others can still be tried"
    for _ in range(2):  # a run that was killed in its first step begins again
        pull_starts(uri, start.parent)
        assert list(start.parent.iterdir()) == [start] and (start / "model.safetensors").read_bytes() == b"weights"
    assert first_drafter(uri, "auto", tmp_path, tmp_path / "init") is None


@pytest.mark.parametrize("spec", ["nobody", f"{NAME}@worst", f"{NAME}/9"])
def test_what_does_not_exist_is_an_error_that_names_it(uri, tmp_path, spec):
    with pytest.raises(ValueError, match=f"no drafter '{spec}' at sqlite.*; `cotrain drafters list` shows"):
        pull_drafter(uri, spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_refused(uri, store):
    with pytest.raises(ValueError, match="is not empty"):
        pull_drafter(uri, NAME, store / "v1")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_changed_in_the_store_is_refused(uri, store, tmp_path, name):
    files = {path: path.read_bytes() for path in (store / "mlartifacts").rglob(name)}
    for path in files:
        path.write_bytes(b"other")
    with pytest.raises(ValueError, match=rf"{name} of .* differs from its record"):
        pull_drafter(uri, NAME, tmp_path / "out")
    assert len(files) == 2 and not (tmp_path / "out").exists()
    for path, content in files.items():
        path.write_bytes(content)


def test_a_run_starts_with_a_drafter_of_the_registry_or_with_a_folder(uri, store, tmp_path):
    folder = first_drafter(uri, f"models:/{NAME}@best", tmp_path, tmp_path / "init")
    assert (folder / "config.json").read_text() == '{"version": 1}'
    assert first_drafter(uri, str(store / "v1"), tmp_path, tmp_path / "init") == store / "v1"
    assert first_drafter(uri, None, tmp_path, tmp_path / "init") is None


def test_drafter_init_errors_name_the_field(uri, tmp_path):
    with pytest.raises(ValueError, match=r"drafter\.init: no drafter 'models:/x@serving'"):
        first_drafter(uri, "models:/x@serving", tmp_path, tmp_path / "init")
    with pytest.raises(ValueError, match=r"drafter\.init: .* has no config\.json and no model\.safetensors"):
        first_drafter(uri, str(tmp_path), tmp_path, tmp_path / "init")
    with pytest.raises(ValueError, match="came with no MTP head"):
        drafter_folder(uri, "native", tmp_path, tmp_path / "init")


@pytest.fixture
def policies(tmp_path):
    """Two policies whose folders have the same last name, and a drafter."""
    folders = [tmp_path / name / "hf" for name in ("maths", "chat")]
    for folder in (*folders, tmp_path / "drafter"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(str(folder).encode())
    return folders


def test_policies_of_one_name_have_registered_models_of_their_own(policies, tmp_path, run_config, mlflow_database):
    uri = f"sqlite:///{mlflow_database}"

    def publish(name, policy):
        """Returns the registered model."""
        fingerprint = model_fingerprints(policy)["model"]
        config = run_config(name=name, policy={"model": str(policy)})
        with Tracker(config, policy=fingerprint) as tracker:
            tracker.log_drafter(tmp_path / "drafter", Versions(1, 1), 1, {}, {"init": "random"})
        return tracker.registered_model

    maths, chat = (f"hf-{model_fingerprints(policy)['model'][:8]}-drafter" for policy in policies)
    names = [publish(name, policies[index]) for name, index in (("a", 0), ("b", 1), ("c", 1), ("d", 0))]
    assert names == [maths, chat, chat, maths] and maths != chat
    serving = {row.name: row.tags["run_name"] for row in list_drafters(uri) if "serving" in row.aliases}
    assert serving == {maths: "d", chat: "c"}
