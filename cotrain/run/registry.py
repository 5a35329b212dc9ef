"""Drafter checkpoints in the MLflow model registry: register one, list them, pull one back.

A drafter is a LoggedModel (files and metrics, linked to its run) and a version of `<policy>-drafter` with tags. Alias
`serving` is the version published last. `best` is the version with the longest acceptance length of the run that
served last, see ServedDrafts.best.
"""

import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Column, Table

from cotrain.models.loading import native_head
from cotrain.run.checkpoint import file_digest
from cotrain.run.mlflow_store import MlflowClient, MlflowException, connect, first_line
from cotrain.run.store_uri import absolute_uri, sqlite_file

# isort: split
from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion

FILES = ("config.json", "model.safetensors")
KIND_TAG = "cotrain.kind"
DIGEST_TAG = "blake2b."
NATIVE = "native"
"""What a user calls the MTP head that came with a policy."""


def list_drafters(uri: str) -> list[ModelVersion]:
    """All drafters at a tracking URI with their aliases, newest first. An sqlite file that does not exist holds none."""
    database = sqlite_file(uri)
    if database and not database.exists():
        return []
    client, rows = connect(uri), []
    for model in client.search_registered_models(f"tags.`{KIND_TAG}` = 'drafter'", max_results=1000):
        for row in client.search_model_versions(f"name = '{model.name}'"):
            row.aliases = sorted(alias for alias, number in model.aliases.items() if str(number) == str(row.version))
            rows.append(row)
    return sorted(rows, key=lambda row: row.creation_timestamp, reverse=True)


def print_drafters(rows: list[ModelVersion], stream: TextIO) -> None:
    """Print a table for people."""
    # rich would cut names to 80 columns when its output is piped.
    console = Console(file=stream, width=None if stream.isatty() else 120)
    if not rows:
        console.print("No drafters yet: a run with [drafter] registers each one that it publishes.")
        return
    # A name is typed into `pull`, so it is never cut, however narrow the terminal is.
    name = Column("drafter", no_wrap=True, min_width=max(len(row.name) for row in rows))
    table = Table(name, "version", "aliases", "policy", "drafter", "acceptance length", "run", "created")
    for row in rows:
        tags, created = row.tags, datetime.fromtimestamp(row.creation_timestamp / 1000)
        table.add_row(
            row.name,
            str(row.version),
            " ".join(row.aliases),
            f"p{tags['policy_version']}",
            f"d{tags['drafter_version']}",
            f"{float(tags['acceptance_length']):.2f} at k={tags['num_speculative_tokens']}"
            if "num_speculative_tokens" in tags
            else "-",
            tags["run_name"],
            created.strftime("%Y-%m-%d %H:%M"),
        )
    console.print(table)


def pull_drafter(uri: str, spec: str, folder: Path) -> ModelVersion:
    """Copy config.json and model.safetensors of NAME, NAME@alias or NAME/version into `folder`, whole or not at all.

    NAME alone means NAME@serving. Raises ValueError when the folder is not empty, when there is no such drafter, or
    when a file is not the one that was registered.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; give a new folder")
    row = find_drafter(uri, spec)
    source_uri = f"models:/{row.name}/{row.version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        try:
            source = Path(download_artifacts(artifact_uri=source_uri, dst_path=f"{partial}/all", tracking_uri=uri))
        except MlflowException as error:
            raise ValueError(f"cannot download {source_uri}: {first_line(error)}") from error
        drafter = Path(partial, "drafter")
        drafter.mkdir()
        for name in FILES:
            if not (source / name).is_file() or file_digest(source / name) != row.tags[DIGEST_TAG + name]:
                raise ValueError(
                    f"{name} of {source_uri} is missing or differs from what was registered; pull another version"
                )
            os.replace(source / name, drafter / name)
        os.replace(drafter, folder)
    return row


def find_drafter(uri: str, spec: str) -> ModelVersion:
    """The version that NAME, NAME@alias or NAME/version names. Raises ValueError when there is none."""
    name, _, version = spec.removeprefix("models:/").partition("/")
    name, _, alias = name.partition("@")
    found = [
        row
        for row in list_drafters(uri)
        if row.name == name and (str(row.version) == version if version else (alias or "serving") in row.aliases)
    ]
    if not found:
        raise ValueError(f"no drafter {spec!r} at {uri}; `cotrain drafters list` shows those that are there")
    return found[0]


def drafter_folder(uri: str, spec: str, model: Path, folder: Path) -> Path:
    """The folder of the drafter that `spec` names: a folder, a models:/ URI (pulled into `folder`) or "native".

    Raises ValueError when there is none.
    """
    if spec == NATIVE:
        head = native_head(model)
        if head is None:
            raise ValueError(f"{model} came with no MTP head; give a drafter's folder")
        return head
    if spec.startswith("models:/"):
        if not folder.exists():  # a resumed run has pulled it
            pull_drafter(absolute_uri(uri), spec, folder)
        return folder
    if missing := [name for name in FILES if not (Path(spec) / name).is_file()]:
        raise ValueError(f"{spec} has no {' and no '.join(missing)}; give a drafter checkpoint folder")
    return Path(spec)


def first_drafter(uri: str, init: str | None, model: Path, folder: Path) -> Path | None:
    """The folder of the drafter that a run starts with: drafter.init, or else the MTP head that came with the policy.

    None starts from random weights. Raises ValueError naming drafter.init.
    """
    if init is None:
        return native_head(model)
    try:
        return drafter_folder(uri, init, model, folder)
    except ValueError as error:
        raise ValueError(f"drafter.init: {error}") from error


def versions_of_run(client: MlflowClient, run_id: str) -> dict[int, ModelVersion]:
    """The registered versions of a run, by drafter version; the newest where one was registered twice."""
    found = client.search_model_versions(f"run_id = '{run_id}'")
    ours = sorted((row for row in found if "drafter_version" in row.tags), key=lambda row: int(row.version))
    return {int(row.tags["drafter_version"]): row for row in ours}


def register(
    client: MlflowClient, run_id: str, name: str, folder: Path, tags: dict[str, str], known: dict[int, ModelVersion]
) -> bool:
    """Store a drafter as a LoggedModel and as a version of `name`, add it to `known`, move alias `serving` to it.

    `tags` hold drafter_version; `known` is `versions_of_run`. Returns False when a resumed run came past the same
    drafter again. Raises FileNotFoundError when the folder is gone, and MLflow's own errors.
    """
    number = int(tags["drafter_version"])
    parent = max((older for older in known if older < number), default=None)
    tags = tags | {"parent_version": str(known[parent].version) if parent is not None else "none"}
    tags |= {DIGEST_TAG + file: file_digest(folder / file) for file in FILES}
    is_new = number not in known or not known[number].tags.items() >= tags.items()
    if is_new:
        known[number] = _create(client, run_id, name, folder, tags)
    client.set_registered_model_alias(name, "serving", str(known[number].version))
    return is_new


def _create(client: MlflowClient, run_id: str, name: str, folder: Path, tags: dict[str, str]) -> ModelVersion:
    experiment, label = client.get_run(run_id).info.experiment_id, f"drafter-d{tags['drafter_version']}"
    model = client.create_logged_model(experiment, label, source_run_id=run_id, tags=tags, model_type="drafter")
    client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    try:
        client.create_registered_model(name, tags={KIND_TAG: "drafter"})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        client.set_registered_model_tag(name, KIND_TAG, "drafter")
    source = f"models:/{model.model_id}"
    return client.create_model_version(name, source, run_id, tags=tags, model_id=model.model_id)


def model_id_of(version: ModelVersion) -> str:
    """The LoggedModel that a version was made from; version.model_id is empty in database stores."""
    return (version.source or "").removeprefix("models:/")
