"""Drafter checkpoints in the MLflow model registry, where Tracker registers them: list them, pull one, start a run with one."""

import logging
import os
import tempfile
from datetime import datetime
from pathlib import Path

import mlflow
import pandas as pd
from mlflow import MlflowException
from mlflow.entities.model_registry import ModelVersion

from cotrain.config.schema import AUTO
from cotrain.models.loading import native_head
from cotrain.run.mlflow_store import absolute_uri, connect, in_short, sqlite_file
from cotrain.weights.digests import file_digest

log = logging.getLogger(__name__)

FILES = ("config.json", "model.safetensors")
DIGEST_TAG, EXPECTED_TAG = "xxh3.", "expected_acceptance_length"
SHOWN_TAGS = ("policy_version", "drafter_version", EXPECTED_TAG, "run_name")
MOST_STARTS = 8  # drafters that drafter.init = "auto" tries
NATIVE = "native"  # what a user calls the MTP head that came with a policy


def list_drafters(uri: str) -> list[ModelVersion]:
    """Return all drafters at a tracking URI with their aliases, newest first; none if the sqlite file does not exist."""
    database = sqlite_file(uri)
    if database and not database.exists():
        return []
    client, newest_first = connect(uri), ["creation_timestamp DESC"]
    rows = mlflow.search_model_versions(filter_string="tags.drafter_version LIKE '%'", order_by=newest_first)
    # The rows that a search returns have no aliases.
    aliases = {name: client.get_registered_model(name).aliases for name in {row.name for row in rows}}
    for row in rows:
        row.aliases = sorted(a for a, version in aliases[row.name].items() if str(version) == str(row.version))
    return rows


def drafter_table(rows: list[ModelVersion], uri: str) -> str:
    """Return the rows of list_drafters as a table, or a line that says at which tracking URI there are none."""
    if not rows:
        return f"No drafters yet at {uri}: a run with [drafter] registers each one that it publishes."
    table = [
        {"name": row.name, "version": row.version, "aliases": " ".join(row.aliases)}
        | {tag: row.tags.get(tag, "-") for tag in SHOWN_TAGS}
        | {"created": f"{datetime.fromtimestamp(row.creation_timestamp / 1000):%Y-%m-%d %H:%M}"}
        for row in rows
    ]
    return pd.DataFrame(table).to_string(index=False)


def pull_drafter(uri: str, spec: str, folder: Path) -> ModelVersion:
    """Copy config.json and model.safetensors of NAME, NAME@alias or NAME/version into `folder`, whole or not at all.

    NAME alone means NAME@serving. Raises ValueError when the folder is not empty, when there is no such drafter, or when a file
    is not the one that was registered.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; give a new folder")
    name, _, number = spec.removeprefix("models:/").partition("/")
    name, _, alias = name.partition("@")
    rows = [row for row in list_drafters(uri) if row.name == name]
    rows = [row for row in rows if (str(row.version) == number if number else (alias or "serving") in row.aliases)]
    if not rows:
        raise ValueError(f"no drafter {spec!r} at {uri}; `cotrain drafters list` shows those that are there")
    row = rows[0]
    source_uri = f"models:/{row.name}/{row.version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        try:
            source = Path(mlflow.artifacts.download_artifacts(source_uri, dst_path=f"{partial}/drafter"))
        except MlflowException as error:
            raise ValueError(f"cannot download {source_uri}: {in_short(error)}") from error
        for file in FILES:
            if not (source / file).is_file() or file_digest(source / file) != row.tags.get(DIGEST_TAG + file):
                raise ValueError(f"{file} of {source_uri} is missing or differs from its record; pull another version")
        os.replace(source, folder)
    return row


def drafter_folder(uri: str, spec: str, model: Path, folder: Path) -> Path:
    """Return the folder that `spec` names: itself, that of a models:/ URI pulled into `folder`, or "native". Raises ValueError."""
    if spec == NATIVE:
        if head := native_head(model):
            return head
        raise ValueError(f"{model} came with no MTP head; give a drafter's folder")
    if spec.startswith("models:/"):
        if not folder.exists():  # a resumed run has pulled it
            pull_drafter(absolute_uri(uri), spec, folder)
        return folder
    if missing := [name for name in FILES if not (Path(spec) / name).is_file()]:
        raise ValueError(f"{spec} has no {' and no '.join(missing)}; give a drafter checkpoint folder")
    return Path(spec)


def pull_starts(uri: str, folder: Path) -> None:
    """Copy the newest MOST_STARTS registered drafters with the alias `best` into folders `NAME-VERSION` of `folder`, unless there."""
    best = [row for row in list_drafters(absolute_uri(uri)) if "best" in row.aliases][:MOST_STARTS]
    for row in best:
        if not (start := folder / f"{row.name}-{row.version}").exists():
            try:
                pull_drafter(absolute_uri(uri), f"{row.name}/{row.version}", start)
            except ValueError as error:  # the others can still be tried
                log.warning("drafter.init: %s", error)


def first_drafter(uri: str, init: str | None, model: Path, folder: Path) -> Path | None:
    """Return the folder of drafter.init, or else of the policy's MTP head; None: a new drafter. Raises ValueError naming it."""
    if init in (None, AUTO):
        return native_head(model)
    try:
        return drafter_folder(uri, init, model, folder)
    except ValueError as error:
        raise ValueError(f"drafter.init: {error}") from error
