"""The URI of the MLflow that a run records into. This module does not import MLflow."""

import shlex
from pathlib import Path

from cotrain.config.schema import RunConfig

SQLITE = "sqlite:///"
DEFAULT_URI = f"{SQLITE}{RunConfig.model_fields['run_root'].default / 'mlflow.db'}"
PARENT_RUN_VARIABLE = "COTRAIN_PARENT_RUN"
"""Environment variable with the MLflow run under which a run is nested; `cotrain ablate` sets it for its runs."""


def tracking_uri(config: RunConfig) -> str:
    """tracking.uri, or sqlite in the run root."""
    return absolute_uri(config.tracking.uri or f"{SQLITE}{config.run_root / 'mlflow.db'}")


def absolute_uri(uri: str) -> str:
    """The same store, named so that it is found from any working directory."""
    return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).resolve()}" if uri.startswith(SQLITE) else uri


def sqlite_file(uri: str) -> Path | None:
    """The database file of a sqlite URI; None for a server."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def uri_argument(uri: str) -> str:
    """The option that points `cotrain ui` and `cotrain drafters` at this store; empty for the default one."""
    return "" if uri == absolute_uri(DEFAULT_URI) else f" --uri {shlex.quote(uri)}"
