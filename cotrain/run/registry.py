"""Drafter checkpoints in the MLflow model registry: put one there, list them, pull one back.

A drafter is a LoggedModel (files and metrics, linked to its run) and a version of `<policy>-drafter` with tags.
Alias `serving` is the last published version. `best` is the version of the run that served last which had the longest
acceptance length in serving, pooled over its steps at the draft length that this run served most.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table

from cotrain.models.loading import native_head
from cotrain.run.mlflow_store import MlflowClient, MlflowException, connect, first_line
from cotrain.run.served_drafts import Served
from cotrain.run.store_uri import absolute_uri, sqlite_file

# isort: split
from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion

FILES = ("config.json", "model.safetensors")
KIND_TAG = "cotrain.kind"
DIGEST_TAG = "blake2b."


@dataclass(frozen=True)
class RegisteredDrafter:
    """One version in the registry."""

    name: str
    version: int
    aliases: tuple[str, ...]
    policy_version: int
    drafter_version: int
    acceptance_length: float | None
    """Over all steps that the version served, at draft_tokens; None until it has served a step."""
    draft_tokens: int | None
    """The draft length at which the version was served most."""
    run_name: str
    created: datetime

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


def list_drafters(uri: str) -> list[RegisteredDrafter]:
    """All drafters at a tracking URI, newest first. An sqlite file that does not exist holds none."""
    database = sqlite_file(uri)
    if database and not database.exists():
        return []
    client = connect(uri)
    rows = []
    for model in _all_pages(client.search_registered_models, filter_string=f"tags.`{KIND_TAG}` = 'drafter'"):
        for version in _all_pages(client.search_model_versions, filter_string=f"name = '{model.name}'"):
            aliases = tuple(
                sorted(alias for alias, number in model.aliases.items() if int(number) == int(version.version))
            )
            rows.append(_from_version(version, aliases))
    return sorted(rows, key=lambda row: row.created, reverse=True)


def print_drafters(rows: list[RegisteredDrafter], stream: TextIO) -> None:
    """A table for people."""
    # 120 columns when piped: rich would otherwise cut names to 80.
    console = Console(file=stream, width=None if stream.isatty() else 120)
    if not rows:
        console.print("No drafters yet: a run with [drafter] registers each one that it publishes.")
        return
    # A name is typed into `pull`, so it is never cut, however narrow the terminal is.
    name = Column("drafter", no_wrap=True, min_width=max(len(row.name) for row in rows))
    table = Table(name, "version", "aliases", "policy", "drafter", "acceptance length", "run", "created")
    for row in rows:
        acceptance = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f} at k={row.draft_tokens}"
        versions = (f"p{row.policy_version}", f"d{row.drafter_version}")
        created = row.created.strftime("%Y-%m-%d %H:%M")
        table.add_row(row.name, str(row.version), " ".join(row.aliases), *versions, acceptance, row.run_name, created)
    console.print(table)


def pull_drafter(uri: str, spec: str, folder: Path) -> RegisteredDrafter:
    """Copy config.json and model.safetensors of NAME, NAME@alias or NAME/version into `folder`, whole or not at all.

    NAME alone means NAME@serving. Raises ValueError when the folder is not empty, when there is no such drafter
    (naming those that are there), or when a file is not the one that was registered.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; give a new folder")
    row = find_drafter(uri, spec)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        source = Path(download_artifacts(artifact_uri=row.uri, dst_path=str(partial), tracking_uri=uri))
        tags = connect(uri).get_model_version(row.name, str(row.version)).tags
        for name in FILES:
            if not (source / name).is_file() or _digest(source / name) != tags[DIGEST_TAG + name]:
                raise ValueError(
                    f"{name} of {row.uri} is missing or differs from what was registered; pull another version"
                )
        for path in source.iterdir():
            if path.name not in FILES:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.replace(source, folder)
    except MlflowException as error:
        raise ValueError(f"cannot download {row.uri}: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return row


def find_drafter(uri: str, spec: str) -> RegisteredDrafter:
    """The version that NAME, NAME@alias or NAME/version means now. Raises ValueError naming what exists."""
    spec = spec.removeprefix("models:/")
    rows = list_drafters(uri)
    name = spec.partition("@")[0].partition("/")[0]
    named = [row for row in rows if row.name == name]
    if not named:
        names = ", ".join(sorted({row.name for row in rows})) or "none"
        raise ValueError(f"no drafter {name!r} at {uri}; there are: {names}")
    if "/" in spec:
        wanted = spec.partition("/")[2]
        found = [row for row in named if str(row.version) == wanted]
        kind, existing = "version", [str(row.version) for row in named]
    else:
        wanted = spec.partition("@")[2] or "serving"
        found = [row for row in named if wanted in row.aliases]
        kind, existing = "alias", [alias for row in named for alias in row.aliases]
    if not found:
        raise ValueError(f"drafter {name!r} has no {kind} {wanted!r}; there are: {', '.join(existing) or 'none'}")
    return found[0]


def resolve_drafter_init(uri: str, init: str, folder: Path) -> tuple[Path, str]:
    """Turn drafter.init into (checkpoint folder, source that stays true when an alias moves).

    A models:/ URI is pulled into `folder`. Raises ValueError naming drafter.init.
    """
    if init.startswith("models:/"):
        try:
            return folder, pull_drafter(uri, init, folder).uri
        except ValueError as error:
            raise ValueError(f"drafter.init: {error}") from error
    if missing := [name for name in FILES if not (Path(init) / name).is_file()]:
        raise ValueError(f"drafter.init: {init} has no {' and no '.join(missing)}; give a drafter checkpoint folder")
    return Path(init), init


NATIVE = "native"
"""What a user calls the MTP head that came with a policy."""


def drafter_folder(uri: str, spec: str, model: Path, folder: Path) -> Path:
    """Folder of the drafter that `spec` names: a folder, a models:/ URI (pulled into `folder`) or "native".

    Raises ValueError when there is none.
    """
    if spec == NATIVE:
        head = native_head(model)
        if head is None:
            raise ValueError(f"{model} came with no MTP head; give a drafter's folder")
        return head
    if spec.startswith("models:/"):
        pull_drafter(absolute_uri(uri), spec, folder)
        return folder
    return Path(spec)


def first_drafter(uri: str, init: str | None, model: Path, folder: Path) -> Path | None:
    """Folder of the drafter that a run starts with: drafter.init, or else the MTP head that came with the policy.

    None starts from random weights. Raises ValueError naming drafter.init.
    """
    return resolve_drafter_init(uri, init, folder)[0] if init is not None else native_head(model)


@dataclass
class Registration:
    """A drafter on its way into the registry. Each part is done once, so that a failed attempt can be repeated."""

    folder: Path
    name: str
    run_id: str
    experiment_id: str
    drafter_version: int
    tags: dict[str, str]
    model_id: str | None = None
    version: int | None = None
    was_registered: bool = False
    """The same files are there already: a resumed run came past this drafter again."""

    def send(self, client: MlflowClient) -> int:
        """Upload and register; move alias `serving`. Returns the registered version.

        Raises FileNotFoundError when the folder is gone; MLflow's own errors otherwise.
        """
        if self.version is None:
            self.tags |= {DIGEST_TAG + name: _digest(self.folder / name) for name in FILES}
            self._compare_with_registered(client)
        if self.version is None:
            if self.model_id is None:
                self.model_id = client.create_logged_model(
                    self.experiment_id,
                    name=f"drafter-d{self.drafter_version}",
                    source_run_id=self.run_id,
                    tags=self.tags,
                    model_type="drafter",
                ).model_id
            client.log_model_artifacts(self.model_id, str(self.folder))
            client.finalize_logged_model(self.model_id, "READY")
            self.version = self._register(client)
        client.set_registered_model_alias(self.name, "serving", str(self.version))
        return self.version

    def _compare_with_registered(self, client: MlflowClient) -> None:
        """Find this very drafter among the run's versions, or else the parent it was trained on from."""
        earlier = [row for row in _versions_of_run(client, self.run_id) if row.name == self.name]
        older = [row for row in earlier if int(row.tags["drafter_version"]) < self.drafter_version]
        parent = max(older, key=_age, default=None)
        self.tags["parent_version"] = str(parent.version) if parent else "none"
        for row in earlier:
            if row.tags.items() >= self.tags.items():
                self.version, self.model_id, self.was_registered = int(row.version), model_id_of(row), True

    def _register(self, client: MlflowClient) -> int:
        try:
            client.create_registered_model(self.name, tags={KIND_TAG: "drafter"})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            client.set_registered_model_tag(self.name, KIND_TAG, "drafter")
        source = f"models:/{self.model_id}"
        version = client.create_model_version(self.name, source, self.run_id, tags=self.tags, model_id=self.model_id)
        return int(version.version)


def find_version(client: MlflowClient, run_id: str, drafter_version: int) -> ModelVersion | None:
    """The newest registered version of one of a run's drafters."""
    found = [row for row in _versions_of_run(client, run_id) if int(row.tags["drafter_version"]) == drafter_version]
    return max(found, key=_age, default=None)


def model_id_of(version: ModelVersion) -> str:
    """The LoggedModel a version was made from; version.model_id is empty in database stores."""
    return (version.source or "").removeprefix("models:/")


def set_served(client: MlflowClient, version: ModelVersion, served: Served) -> None:
    """Tag a version with what it has reached in serving, with the draft length and the number of verification steps."""
    tags = {
        "acceptance_length": f"{served.acceptance_length:.4f}",
        "draft_tokens": str(served.draft_tokens),
        "num_drafts": str(served.num_drafts),
    }
    for name, value in tags.items():
        client.set_model_version_tag(version.name, str(version.version), name, value)


def _versions_of_run(client: MlflowClient, run_id: str) -> list[ModelVersion]:
    versions = _all_pages(client.search_model_versions, filter_string=f"run_id = '{run_id}'")
    return [row for row in versions if "drafter_version" in row.tags]


def _age(row: ModelVersion) -> tuple[int, int]:
    return int(row.tags["drafter_version"]), int(row.version)


def _from_version(version: ModelVersion, aliases: tuple[str, ...]) -> RegisteredDrafter:
    tags = version.tags
    return RegisteredDrafter(
        name=version.name,
        version=int(version.version),
        aliases=aliases,
        policy_version=int(tags["policy_version"]),
        drafter_version=int(tags["drafter_version"]),
        acceptance_length=float(tags["acceptance_length"]) if "draft_tokens" in tags else None,
        draft_tokens=int(tags["draft_tokens"]) if "draft_tokens" in tags else None,
        run_name=tags["run_name"],
        created=datetime.fromtimestamp(version.creation_timestamp / 1000),
    )


def _all_pages(search: Any, filter_string: str) -> list[Any]:
    found: list[Any] = []
    token: str | None = None
    while True:
        page = search(filter_string=filter_string, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
