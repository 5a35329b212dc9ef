"""What holds for every test: few threads, no network, nothing recorded outside the test's own folder."""

import os

# Each of the test processes that run side by side has a core of its own, and so have the processes that it starts.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

# Before torch, Ray and MLflow are imported. Tests share the cores with the processes they start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("MLFLOW_TRACKING_URI", None)

import pytest

from cotrain.config.schema import RunConfig
from tests.empty_store import empty_store, place_empty_store
from tests.file_times import FileTimes, longest_first


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the session itself, and none of its processes
        config.pluginmanager.register(FileTimes())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)


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
def empty_mlflow_database():
    """An sqlite file with MLflow's tables."""
    return empty_store()


@pytest.fixture
def mlflow_database(tmp_path):
    """The default store of run_config's run root, empty."""
    return place_empty_store(tmp_path / "runs")
