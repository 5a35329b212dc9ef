"""An MLflow store without a record, which tests copy: making its tables takes seconds in each new run root."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

CACHE = Path(__file__).parents[1] / ".pytest_cache"


def empty_store() -> Path:
    """An sqlite file with MLflow's tables, made once for all sessions."""
    path = CACHE / f"mlflow-{version('mlflow')}.db"
    CACHE.mkdir(exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            from cotrain.run.mlflow_store import connect

            unfinished = path.with_suffix(f".{os.getpid()}")
            connect(f"sqlite:///{unfinished}")
            unfinished.rename(path)
    return path


def place_empty_store(run_root: Path) -> Path:
    """Give a run root its default store, unless it has one. Returns the file."""
    database = run_root / "mlflow.db"
    if not database.exists():
        run_root.mkdir(parents=True, exist_ok=True)
        shutil.copy(empty_store(), database)
    return database


def registered_version(tracker: Any, drafter: int) -> int | None:
    """The version in MLflow of a tracker's drafter, once all that was logged before has been sent; None if there is none."""
    tracker._outbox._thread.submit(int).result(60)
    row = tracker._registered.get(drafter)
    return None if row is None else int(row.version)
