"""The MLflow store that a run records into: its URI, a check that it can be used, and a client.

MLflow takes 2 s to import, so only `connect` imports it.
"""

import logging
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import urlopen

from cotrain.config.schema import RunConfig
from cotrain.config.sidecar import SidecarConfig
from cotrain.process.scratch import scratch_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
DEFAULT_URI = f"{SQLITE}{RunConfig.model_fields['run_root'].default / 'mlflow.db'}"
PARENT_RUN_VARIABLE = "COTRAIN_PARENT_RUN"
"""Environment variable with the MLflow run under which a run is nested; `cotrain ablate` sets it for its runs."""
HEALTH_TIMEOUT_S = 5.0
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def tracking_uri(config: RunConfig | SidecarConfig) -> str:
    """Return tracking.uri, or by default that of an sqlite file in the run root."""
    return absolute_uri(config.tracking.uri or f"{SQLITE}{config.run_root / 'mlflow.db'}")


def absolute_uri(uri: str) -> str:
    """Return the URI such that it finds the same store from any working directory."""
    return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).resolve()}" if uri.startswith(SQLITE) else uri


def sqlite_file(uri: str) -> Path | None:
    """The database file of a sqlite URI; None for a server."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def uri_argument(uri: str) -> str:
    """The option that points `cotrain ui` and `cotrain drafters` at this store; empty for the default one."""
    return "" if uri == absolute_uri(DEFAULT_URI) else f" --uri {shlex.quote(uri)}"


def check_uri(uri: str) -> None:
    """Raise ValueError naming tracking.uri unless it is a writable database, or a server that answers."""
    if database := sqlite_file(uri):
        nearest = next(path for path in (database, *database.parents) if path.exists())
        if not os.access(nearest, os.W_OK):
            raise ValueError(f"tracking.uri: {database} cannot be written; set tracking.uri or run_root elsewhere")
    elif uri.startswith(("http://", "https://")):
        try:
            urlopen(f"{uri.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S).close()
        except OSError as error:
            # A proxy that wants a login has answered; MLflow itself reads MLFLOW_TRACKING_USERNAME and _TOKEN.
            if getattr(error, "code", None) not in (401, 403):
                raise ValueError(
                    f"tracking.uri: no answer from {uri} ({error}); start that server, or leave tracking.uri out to "
                    "record into sqlite in the run root"
                ) from None
    elif urlsplit(uri).scheme.partition("+")[0] not in DATABASES:
        raise ValueError(f"tracking.uri: {uri!r} is neither http(s):// nor a database such as sqlite:///PATH.db")


def connect(uri: str) -> "MlflowClient":
    """Return a client of a store that answers. Creating an sqlite file takes seconds. Raises ValueError naming tracking.uri."""
    check_uri(uri)
    if database := sqlite_file(uri):
        database.parent.mkdir(parents=True, exist_ok=True)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # This logger writes pages of traceback for an error that is raised as well, for example when the disk is full.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    # Registering a logged model looks it up in the store of the process, not in that of the client.
    mlflow.set_tracking_uri(uri)
    try:
        if database and not database.exists():
            _create(database)
        client = mlflow.MlflowClient(uri, uri)
        client.search_experiments(max_results=1)
    except mlflow.MlflowException as error:
        raise ValueError(f"tracking.uri: {uri} cannot be used: {first_line(error)}") from error
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
    """Return the id of the experiment `cotrain`, or MLFLOW_EXPERIMENT_NAME; create it if it does not exist.

    Raises ValueError when it was deleted.
    """
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


def first_line(error: Exception) -> str:
    """Return the start of an error's first line, because MLflow's texts run to pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
