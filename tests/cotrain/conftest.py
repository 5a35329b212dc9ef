"""Fixtures shared by the tests of cotrain."""

import shutil

import pytest

from cotrain.config import RunConfig


@pytest.fixture
def run_config(tmp_path):
    """A small RunConfig in a fresh run root; keyword arguments replace top-level fields."""

    def build(**changes) -> RunConfig:
        fields = {
            "name": "first",
            "steps": 4,
            "run_root": tmp_path / "runs",
            "policy": {"model": "bundled:smollm2-135m-instruct"},
            "drafter": {"model": {"type": "eagle3"}},
            "task": {"type": "reasoning_gym", "name": "chain_sum"},
        }
        return RunConfig(**fields | changes)

    return build


@pytest.fixture(scope="session")
def empty_mlflow_database(tmp_path_factory):
    """An sqlite file with MLflow's tables: making one takes 7 s, copying it nothing."""
    from cotrain.mlflow_store import connect

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{path}")
    return path


@pytest.fixture
def mlflow_database(empty_mlflow_database, tmp_path):
    """The default store of run_config's run root, empty."""
    path = tmp_path / "runs" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(empty_mlflow_database, path)
    return path
