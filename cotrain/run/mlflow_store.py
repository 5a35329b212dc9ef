"""The MLflow store that a run records into. MLflow takes 2 s to import, so only `connect` imports it."""

import logging
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import urlopen

from cotrain.config.schema import RunConfig, default_run_root
from cotrain.config.sidecar import SidecarConfig
from cotrain.config.surroundings import can_write
from cotrain.process.children import environment
from cotrain.process.scratch import scratch_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
URI_VARIABLE = "MLFLOW_TRACKING_URI"  # environment variable with the store of runs and commands that name none
EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
"""Environment variable with the experiment of runs; `cotrain ablate` sets it to the study's name unless it is set."""
HEALTH_TIMEOUT_S = 5.0
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def tracking_uri(config: RunConfig | SidecarConfig) -> str:
    """Return tracking.uri, or else MLFLOW_TRACKING_URI, or else that of an sqlite file in the run root."""
    return absolute_uri(config.tracking.uri or default_uri(config.run_root))


def default_uri(run_root: Path | None = None) -> str:
    """Return the URI of the store when none is named. run_root: None for commands that have no configuration."""
    return os.environ.get(URI_VARIABLE) or f"{SQLITE}{(run_root or default_run_root()) / 'mlflow.db'}"


def absolute_uri(uri: str) -> str:
    """Return the URI such that it means the same store in any working directory."""
    database = sqlite_file(uri)
    return f"{SQLITE}{database.resolve()}" if database else uri


def sqlite_file(uri: str) -> Path | None:
    """Return the database file of a sqlite URI; None for a server."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def page_of(uri: str) -> str:
    """Return the page of a tracking server, or the command that serves another store."""
    is_server = uri.startswith(("http://", "https://"))
    return uri if is_server else f"mlflow server --backend-store-uri {shlex.quote(uri)} --workers 1"


def check_uri(uri: str) -> None:
    """Raise ValueError naming tracking.uri or the variable unless it is a writable database, or a server that answers."""
    variable, database = os.environ.get(URI_VARIABLE), sqlite_file(uri)
    field = URI_VARIABLE if variable and absolute_uri(variable) == uri else "tracking.uri"
    if database and not can_write(database):
        raise ValueError(f"{field}: {database} cannot be written; set tracking.uri or run_root elsewhere")
    if database and {"%", "?"} & set(uri):  # SQLAlchemy would decode what follows
        raise ValueError(
            f"{field}: MLflow cannot use a path with % or ? ({database}); set tracking.uri or run_root elsewhere"
        )
    if uri.startswith(("http://", "https://")):
        try:
            urlopen(f"{uri.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S).close()
        except OSError as error:
            # A proxy that wants a login has answered; MLflow itself reads MLFLOW_TRACKING_USERNAME and _TOKEN.
            if getattr(error, "code", None) not in (401, 403):
                raise ValueError(
                    f"{field}: no answer from {uri} ({error}); start that server, or leave {field} out to record into "
                    "sqlite in the run root"
                ) from None
    elif urlsplit(uri).scheme.partition("+")[0] not in DATABASES:
        raise ValueError(f"{field}: {uri!r} is neither http(s):// nor a database such as sqlite:///PATH.db")


def connect(uri: str) -> "MlflowClient":
    """Return a client of a store that answers. Creating an sqlite file takes seconds. Raises ValueError as check_uri does."""
    check_uri(uri)
    if database := sqlite_file(uri):
        database.parent.mkdir(parents=True, exist_ok=True)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # This logger writes pages of traceback for an error that is raised as well, for example when the disk is full.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    # Registering a logged model looks it up in the store of the process, not in that of the client.
    with environment({}):  # MLflow sets the variable too, but processes that this one starts may have other stores
        mlflow.set_tracking_uri(uri)
    try:
        if database and not database.exists():
            _create(database)
        client = mlflow.MlflowClient(uri, uri)
        client.search_experiments(max_results=1)
    except mlflow.MlflowException as error:
        raise ValueError(f"tracking.uri or {URI_VARIABLE}: {uri} cannot be used: {in_short(error)}") from error
    return client


def _create(database: Path) -> None:
    """Create an sqlite file elsewhere and then give it its name: MLflow can never open one that was killed in its creation."""
    import mlflow

    with scratch_folder("mlflow", database.parent) as folder:
        uri = f"{SQLITE}{folder / database.name}"
        mlflow.MlflowClient(uri, uri).search_experiments(max_results=1)
        with suppress(FileExistsError):  # another run has created it meanwhile
            try:
                os.link(folder / database.name, database)
            except PermissionError:  # a file system without links
                os.rename(folder / database.name, database)


def experiment_id(client: "MlflowClient", uri: str) -> str:
    """Return the id of the experiment `cotrain`, or MLFLOW_EXPERIMENT_NAME, or create it. Raises ValueError if it was deleted."""
    name = os.environ.get(EXPERIMENT_VARIABLE, "cotrain")
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # MLflow's default for sqlite is ./mlruns of whatever directory the run was started from.
        database = sqlite_file(uri)
        folder = database and database.parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", name)
        return client.create_experiment(name, artifact_location=folder.as_uri() if folder else None)
    if experiment.lifecycle_stage != "active":
        raise ValueError(f"{EXPERIMENT_VARIABLE}: {name!r} was deleted in MLflow; restore it or choose another name")
    return experiment.experiment_id


def in_short(error: Exception) -> str:
    """Return what an error of MLflow says, whose texts run to pages, and what a user can do about it where that is known."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = shorten(line.rpartition("(Caused by ")[2], 200, placeholder=" ...")
    status = error.get_http_status_code() if hasattr(error, "get_http_status_code") else None
    if status in (401, 403):
        return f"{text}; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    if status == 404:
        return f"{text}; restore it in MLflow"
    return f"{text}; see to {error.filename}" if isinstance(error, OSError) and error.filename else text
