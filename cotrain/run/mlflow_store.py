"""Which MLflow a run talks to, and whether it is there. Imported before anything else of MLflow."""

import logging
import os
import re
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

# Set before the import, which reads them. MLflow retries a failed request for minutes; here rows wait in
# metrics.jsonl and are sent again with the next step, so a request may fail early.
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


def artifact_location(uri: str, experiment: str) -> str | None:
    """Where files of a new experiment go: beside a sqlite file; a server decides for itself."""
    database = sqlite_file(uri)
    if database is None:
        return None
    # The default is ./mlruns of whatever directory the run was started from.
    return (database.parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", experiment)).as_uri()


def check_uri(uri: str) -> None:
    """Raise ValueError naming tracking.uri when it is no database or server, or nothing answers within seconds."""
    fix = "start that server, or leave tracking.uri out to record into sqlite in the run root"
    if database := sqlite_file(uri):
        folder = next(parent for parent in database.parents if parent.exists())
        if not os.access(database if database.exists() else folder, os.W_OK):
            raise ValueError(
                f"tracking.uri: {database} cannot be written; set tracking.uri or run_root to a place that can"
            )
    elif uri.startswith(("http://", "https://")):
        try:
            urlopen(f"{uri.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S).close()
        except HTTPError as error:
            # A proxy that wants a login has answered; MLflow itself reads MLFLOW_TRACKING_USERNAME and _TOKEN.
            if error.code not in (401, 403):
                raise ValueError(
                    f"tracking.uri: {uri} is no MLflow server (/health answers {error.code}); {fix}"
                ) from None
        except (URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(f"tracking.uri: no answer from {uri} ({reason}); {fix}") from None
    elif urlsplit(uri).scheme.partition("+")[0] not in ("sqlite", "postgresql", "mysql", "mssql"):
        raise ValueError(f"tracking.uri: {uri!r} is neither http(s):// nor a database such as sqlite:///PATH.db")


def connect(uri: str) -> MlflowClient:
    """Client of a store that answers. A new sqlite file takes about 7 s once. Raises ValueError, see check_uri()."""
    check_uri(uri)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It logs the traceback of what it also raises: pages, where one line says that the disk is full.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if database := sqlite_file(uri):
        database.parent.mkdir(parents=True, exist_ok=True)
    # Registering a logged model looks it up in the process's own store, whatever store the client was made for.
    mlflow.set_tracking_uri(uri)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        raise ValueError(f"tracking.uri: {uri} cannot be used: {first_line(error)}") from error
    return client


def first_line(error: Exception) -> str:
    """Start of an error's text; MLflow's run to pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def experiment_id(client: MlflowClient, uri: str) -> str:
    """Id of the experiment of this name, which is made when there is none. Raises ValueError when it was deleted."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cotrain")
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name, artifact_location=artifact_location(uri, name))
    if experiment.lifecycle_stage != "active":
        raise ValueError(f"MLFLOW_EXPERIMENT_NAME: {name!r} was deleted in MLflow; restore it or choose another name")
    return experiment.experiment_id
