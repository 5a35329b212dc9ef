"""Checkpoints of a run: a folder per step that is either whole or not there.

Everything is written into a temporary folder and flushed to disk; COMPLETE, the list of all files with their sizes
and digests, is written last; one rename gives the folder its name. A folder without a valid COMPLETE is never loaded,
nor is one of which a file has changed.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cotrain.config.files import write_json
from cotrain.config.schema import RunConfig
from cotrain.records import Versions
from cotrain.run.provenance import FREE_FIELDS, flatten
from cotrain.run.run_dir import RunDir

log = logging.getLogger(__name__)

SCHEMA = 4
FREE_BELOW = ("drafter.on_drafter_failure", "drafter.alarms.", "lossless.")
"""Beside FREE_FIELDS, what a resume may change: it decides when a run stops, not what it computes."""


class DiskFullError(OSError):
    """The disk cannot hold the checkpoint. Earlier checkpoints are untouched."""


@dataclass(frozen=True)
class RunState:
    """state.json: where the run stands after `step`, beside what the learners save themselves."""

    step: int
    versions: Versions
    task_position: Any
    """Where the task's sampling order stands, as the task reports it."""
    config: dict[str, Any]
    """The configuration, as RunConfig.model_dump(mode="json") gives it."""
    fingerprints: dict[str, str]
    """Digests of the policy and tokenizer files, see model_fingerprints()."""
    tracking_run_id: str | None = None
    seconds: float = 0.0
    """Of all steps so far."""
    lossless: dict[str, Any] | None = None
    """LosslessMonitor.state()."""
    drafting: dict[str, Any] | None = None
    """Publisher.state(); None without a drafter."""


@contextmanager
def new_checkpoint(run_dir: RunDir, state: RunState, keep_last: int) -> Iterator[Path]:
    """Yield the folder to write `policy/` and `drafter/` into; on leaving, make it the newest checkpoint and prune.

    The size of the newest checkpoint is compared with the free space first. Raises DiskFullError (OSError, ENOSPC),
    FileExistsError when the step is saved already. On any error the temporary folder is removed.
    """
    final = run_dir.checkpoint(state.step)
    if final.exists():
        raise FileExistsError(f"checkpoint of step {state.step} is there already: {final}")
    folder = run_dir.checkpoints / f".tmp_{final.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        newest = max(run_dir.checkpoints.glob("step_*"), default=None)
        expected_bytes = _folder_bytes(newest) if newest else 0
        if shutil.disk_usage(folder).free < expected_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield folder
        write_json(folder / "state.json", asdict(state))
        _seal(folder)
        os.replace(folder, final)
        _sync(run_dir.checkpoints)
    except BaseException as error:
        full, written = is_disk_full(error, folder), _folder_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not full:
            raise
        raise DiskFullError(
            errno.ENOSPC,
            f"disk full while saving step {state.step}: needs about {_mib(max(expected_bytes, written))}, free are "
            f"{_mib(shutil.disk_usage(run_dir.path).free)} in {run_dir.path}. Earlier checkpoints are intact. Make "
            f"room (checkpoint.keep_last=1 keeps fewer) and continue with {run_dir.resume}",
        ) from error
    _prune(run_dir, keep_last)


def latest_checkpoint(run_dir: RunDir) -> Path | None:
    """Newest whole checkpoint. Damaged ones are passed over with a warning.

    Raises ValueError for one that another version of cotrain has saved: passed over, it would be deleted as damaged.
    """
    for folder in sorted(run_dir.checkpoints.glob("step_*"), reverse=True):
        if (schema := _schema_of(folder)) not in (None, SCHEMA):
            raise ValueError(
                f"checkpoint {folder} has schema {schema}, this version of cotrain reads {SCHEMA}: resume with the version "
                "that saved it, or start another run with a new name"
            )
        if defect := find_defect(folder):
            log.warning("checkpoint %s is not used: %s", folder, defect)
        else:
            return folder
    return None


def find_defect(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when it is whole.

    Every file is read and its digest compared.
    """
    try:
        complete = json.loads((folder / "COMPLETE").read_text())
        files = complete["files"]
    except FileNotFoundError:
        return "it was never completed"
    except (ValueError, KeyError, TypeError):
        return "COMPLETE is damaged"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        if _digest(path) != expected["blake2b"]:
            return f"{name} has changed since it was saved"
    return None


def _schema_of(folder: Path) -> Any:
    """The schema that the checkpoint was saved with; None where COMPLETE does not say."""
    try:
        return json.loads((folder / "COMPLETE").read_text())["schema"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def load_state(folder: Path) -> RunState:
    """state.json of a whole checkpoint."""
    fields = json.loads((folder / "state.json").read_text())
    return RunState(**fields | {"versions": Versions(**fields["versions"])})


def discard_newer(run_dir: RunDir, step: int, drafter_version: int) -> None:
    """Before a resume from `step`: delete what the replayed steps will write again, and leftovers of a killed save."""
    for folder in run_dir.checkpoints.glob(".tmp_*"):
        shutil.rmtree(folder)
    for folder in run_dir.checkpoints.glob("step_*"):
        if folder.name > run_dir.checkpoint(step).name:
            shutil.rmtree(folder)
    for file in run_dir.samples.glob("step_*.jsonl"):
        if file.name > run_dir.samples_file(step).name:
            file.unlink()
    for folder in run_dir.drafters.glob("v*"):
        if folder.name > run_dir.drafter(drafter_version).name:
            shutil.rmtree(folder)


def model_fingerprints(model_folder: Path) -> dict[str, str]:
    """Digests that tell one policy from another: {"model": ..., "tokenizer": ...}.

    Of each weight file the size and the first and last MiB count, so that a large model takes milliseconds.
    """
    weights, tokenizer = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for path in sorted(model_folder.iterdir()):
        if path.suffix == ".safetensors" or path.name == "config.json":
            with path.open("rb") as file:
                weights.update(f"{path.name} {path.stat().st_size}".encode() + file.read(2**20))
                file.seek(-min(2**20, path.stat().st_size), os.SEEK_END)
                weights.update(file.read())
        elif path.name.startswith(("token", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")):
            tokenizer.update(path.name.encode() + path.read_bytes())
    return {"model": weights.hexdigest(), "tokenizer": tokenizer.hexdigest()}


def check_resume(config: RunConfig, fingerprints: dict[str, str], saved: RunState) -> None:
    """Raise ValueError when `config` would not continue the saved run; every changed field is listed."""
    old = flatten({key: value for key, value in saved.config.items() if key not in FREE_FIELDS})
    new = flatten(config.model_dump(mode="json", exclude=set(FREE_FIELDS)))
    changed = [
        f"  {field}: {old.get(field, '(not set)')!r} -> {new.get(field, '(not set)')!r}"
        for field in sorted(old.keys() | new.keys())
        if old.get(field) != new.get(field) and not field.startswith(FREE_BELOW)
    ]
    names = {"model": "policy.model: its weights or config.json", "tokenizer": "policy.model: its tokenizer"}
    changed += [
        f"  {names[kind]} changed on disk since the run began"
        for kind, digest in saved.fingerprints.items()
        if fingerprints.get(kind) != digest
    ]
    if changed:
        raise ValueError(
            "--resume: the run was started with other settings:\n" + "\n".join(changed) + "\nOnly steps, "
            "checkpoint.*, tracking.*, cluster.*, lossless.*, drafter.alarms.* and drafter.on_drafter_failure may "
            "change; for anything else start a new run with name=..."
        )


def _seal(folder: Path) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "blake2b": _digest(path)}
        _sync(path)
    write_json(folder / "COMPLETE", {"schema": SCHEMA, "files": files})
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _sync(directory)


def _prune(run_dir: RunDir, keep_last: int) -> None:
    for folder in sorted(run_dir.checkpoints.glob("step_*"))[:-keep_last]:
        shutil.rmtree(folder)


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Also true for libraries and Ray actors that wrap the OSError, or drop it and only say that a write failed."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "no space left" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(folder).free < 2**20


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
