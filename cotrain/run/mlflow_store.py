"""Connects to MLflow. Import this module before MLflow itself, because it sets MLflow's environment."""

import logging
import os
import re
from urllib.parse import urlsplit
from urllib.request import urlopen

# MLflow retries a failed request for minutes. A run keeps its rows in metrics.jsonl and sends them again with the next
# step, so a request may fail early.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from cotrain.run.store_uri import sqlite_file

HEALTH_TIMEOUT_S = 5.0
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def check_uri(uri: str) -> None:
    """Raise ValueError naming tracking.uri unless it is a writable database, or a server that answers."""
    if database := sqlite_file(uri):
        folder = next(parent for parent in database.parents if parent.exists())
        if not os.access(database if database.exists() else folder, os.W_OK):
            raise ValueError(
                f"tracking.uri: {database} cannot be written; set tracking.uri or run_root to a place that can"
            )
    elif uri.startswith(("http://", "https://")):
        _check_server(uri)
    elif urlsplit(uri).scheme.partition("+")[0] not in DATABASES:
        raise ValueError(f"tracking.uri: {uri!r} is neither http(s):// nor a database such as sqlite:///PATH.db")


def _check_server(uri: str) -> None:
    try:
        urlopen(f"{uri.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S).close()
    except OSError as error:
        # A proxy that wants a login has answered; MLflow itself reads MLFLOW_TRACKING_USERNAME and _TOKEN.
        if getattr(error, "code", None) not in (401, 403):
            raise ValueError(
                f"tracking.uri: no answer from {uri} ({error}); start that server, or leave tracking.uri out to "
                "record into sqlite in the run root"
            ) from None


def connect(uri: str) -> MlflowClient:
    """A client of a store that answers. A new sqlite file takes some seconds. Raises ValueError naming tracking.uri."""
    check_uri(uri)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # This logger writes pages of traceback for an error that is raised as well, for example when the disk is full.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if database := sqlite_file(uri):
        database.parent.mkdir(parents=True, exist_ok=True)
    # Registering a logged model looks it up in the store of the process, not in that of the client.
    mlflow.set_tracking_uri(uri)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        raise ValueError(f"tracking.uri: {uri} cannot be used: {first_line(error)}") from error
    return client


def first_line(error: Exception) -> str:
    """The start of an error's text, since MLflow's texts run to pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def experiment_id(client: MlflowClient, uri: str) -> str:
    """Id of the experiment of this name, which is made when there is none. Raises ValueError when it was deleted."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cotrain")
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # MLflow's default for sqlite is ./mlruns of whatever directory the run was started from.
        database = sqlite_file(uri)
        folder = database and database.parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", name)
        return client.create_experiment(name, artifact_location=folder.as_uri() if folder else None)
    if experiment.lifecycle_stage != "active":
        raise ValueError(f"MLFLOW_EXPERIMENT_NAME: {name!r} was deleted in MLflow; restore it or choose another name")
    return experiment.experiment_id
