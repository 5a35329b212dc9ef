"""Checkpoints of a run: one folder per step, which is either complete or does not exist.

Everything is written into a temporary folder. COMPLETE, the list of all files with their digests, is written last, and one
rename gives the folder its name. A folder without a valid COMPLETE, or with a changed file, is never loaded. Large files are hashed
while they are written (DigestedFile), so that none of them is read again.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cotrain.records import Versions
from cotrain.run.provenance import FREE_FIELDS, flatten
from cotrain.run.run_dir import RunDir
from cotrain.weights.digests import SUFFIX, file_digest, take_digest
from drafters.config import Section
from drafters.files import CONFIG, GENERATION_CONFIG, INDEX, flush, write_json

log = logging.getLogger(__name__)

SCHEMA = 14
MIB, FINGERPRINT_MIB = 2**20, 1024
FREE = (
    "steps", "checkpoint.*", "tracking.*", "cluster.*", "lossless.*", "policy.micro_batch_tokens", "policy.num_processes",
    "policy.sharding", "policy.weight_transfer", "rollout.max_prompt_tokens", "stream.reward_timeout_s", "task.num_scorers",
    "task.skip_bad_rows", "validation.*", "drafter.alarms.*", "drafter.on_drafter_failure",
)  # fmt: skip
"""A resume may change these and FREE_FIELDS: they decide when a run stops or where it computes, but not what. Which rows fit
and are left out is part of the task's fingerprint."""


@dataclass(frozen=True)
class RunState:
    """The contents of state.json: the state of a run after `step`, besides what the learners save themselves."""

    step: int
    versions: Versions
    config: dict[str, Any]  # the configuration, as model_dump(mode="json") gives it
    fingerprints: dict[str, str]
    """Digests of the policy's and the tokenizer's files, from model_fingerprints(), and of a run's task."""
    seconds: float = 0.0  # duration of all steps so far
    lossless: dict[str, Any] | None = None  # LosslessMonitor.state()
    drafting: dict[str, Any] | None = None  # Publisher.state(); None without a drafter
    stream: dict[str, Any] | None = None  # Producer.state(); only a run has one
    heads: dict[str, int] = field(default_factory=dict)
    """Policy version of each embedding and head that a sidecar knows, by digest."""


@contextmanager
def new_checkpoint(run_dir: RunDir, state: RunState, keep_last: int, trial: bool = False) -> Iterator[Path]:
    """Yield the folder for the learners to save into; on leaving, make it the newest checkpoint and delete old ones.

    `state` is written at once, so it may change meanwhile. trial: delete the folder instead, once its state is read back. Raises
    OSError naming the fix when the disk is full.
    """
    final = run_dir.checkpoint(state.step)
    folder = run_dir.checkpoints / f".tmp_{final.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        write_json(folder / "state.json", asdict(state))
        yield folder
        paths = [path for path in sorted(folder.rglob("*")) if path.suffix != SUFFIX]
        for path in paths:
            if not path.with_name(path.name + SUFFIX).exists():  # a file with a digest beside it has been flushed
                flush(path)
        files = {path.relative_to(folder).as_posix(): take_digest(path) for path in paths if path.is_file()}
        write_json(folder / "COMPLETE", {"schema": SCHEMA, "files": files})
        flush(folder)
        if trial:
            load_state(folder)
            return shutil.rmtree(folder)
        os.replace(folder, final)
        flush(run_dir.checkpoints)
    except BaseException as error:
        full = is_disk_full(error, folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not full:
            raise
        raise OSError(
            errno.ENOSPC,
            f"disk full while saving step {state.step} in {run_dir.path}. Earlier checkpoints are intact. Make room "
            f"(checkpoint.keep_last=1 keeps fewer) and continue with {run_dir.resume}",
        ) from error
    for old in sorted(run_dir.checkpoints.glob("step_*"))[:-keep_last]:
        shutil.rmtree(old)


def latest_checkpoint(run_dir: RunDir) -> Path | None:
    """Return the newest complete checkpoint. Damaged ones are skipped with a warning. Raises as find_defect does."""
    for folder in sorted(run_dir.checkpoints.glob("step_*"), reverse=True):
        defect = find_defect(folder)
        if defect is None:
            return folder
        log.warning("checkpoint %s is not used: %s", folder, defect)
    return None


def find_defect(folder: Path) -> str | None:
    """Read every file of a checkpoint folder. Returns what is wrong with it, or None when it is whole.

    Raises ValueError for a checkpoint of another version of cotrain: if it were skipped, it would be deleted as damaged.
    """
    try:
        complete = json.loads((folder / "COMPLETE").read_text())
        schema, files = complete["schema"], complete["files"].items()
    except FileNotFoundError:
        return "it was never completed"
    except (ValueError, KeyError, TypeError):
        return "COMPLETE is damaged"
    if schema != SCHEMA:
        raise ValueError(
            f"checkpoint {folder} has schema {schema}, this version of cotrain reads {SCHEMA}: resume with the version "
            "that saved it, or start another run with a new name"
        )
    for name, digest in files:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_digest(folder / name) != digest:
            return f"{name} has changed since it was saved"
    return None


def load_state(folder: Path) -> RunState:
    return TypeAdapter(RunState).validate_json((folder / "state.json").read_bytes())


def newest_state(run_dir: RunDir, config: Section, fingerprints: dict[str, str]) -> RunState:
    """Return where a run continues, and delete what it will write again. Raises ValueError as `check_resume` does."""
    folder = latest_checkpoint(run_dir)
    if folder is None and run_dir.resumed:
        log.warning("%s has no checkpoint that can be used: it begins again with its first step", run_dir.path)
    first = RunState(0, Versions(0, 0), config.model_dump(mode="json"), fingerprints)
    state = load_state(folder) if folder else first
    check_resume(config, fingerprints, state)
    discard_newer(run_dir, state.step, state.versions.drafter)
    return state


def discard_newer(run_dir: RunDir, step: int, drafter_version: int) -> None:
    """Before a resume from `step`, delete what the replayed steps write again, and leftovers of a killed save."""
    for folder in run_dir.checkpoints.glob(".tmp_*"):
        shutil.rmtree(folder)
    last = run_dir.checkpoint(step), run_dir.drafter(drafter_version), run_dir.samples_file(step)
    for newest, pattern in zip(last, ("step_*", "v*", "step_*.jsonl"), strict=True):
        for path in newest.parent.glob(pattern):
            if path > newest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def model_fingerprints(model_folder: Path) -> dict[str, str]:
    """Return digests that tell one policy from another: {"model": ..., "tokenizer": ...}. A copy of a folder has the same.

    Names, sizes and contents are hashed. Of weights with more than FINGERPRINT_MIB, every n-th MiB of each file is read, so
    that this takes a second for the largest policy. Training moves nearly every number, so two policies differ in those too.
    """
    model, tokenizer = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    files = sorted(path for path in model_folder.iterdir() if path.is_file())
    weights = [path for path in files if path.suffix == ".safetensors"]
    stride = ceil(sum(path.stat().st_size for path in weights) / (FINGERPRINT_MIB * MIB)) or 1
    for path in files:
        if path in weights or path.name in (CONFIG, GENERATION_CONFIG, INDEX):
            size = path.stat().st_size
            model.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for start in range(0, size, stride * MIB if path in weights else MIB):
                    file.seek(start)
                    model.update(file.read(MIB))
        elif path.name.startswith(("token", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")):
            tokenizer.update(path.name.encode() + path.read_bytes())
    return {"model": model.hexdigest(), "tokenizer": tokenizer.hexdigest()}


def check_resume(config: Section, fingerprints: dict[str, str], saved: RunState) -> None:
    """Raise ValueError when `config` would not continue the saved run; every changed field is listed."""
    old, new = flatten(saved.config), flatten(config.model_dump(mode="json"))
    free = (*(name.removesuffix("*") for name in FREE), *(f"{field}." for field in FREE_FIELDS))
    changed = [
        f"  {field}: {old.get(field, '(not set)')!r} -> {new.get(field, '(not set)')!r}"
        for field in sorted(old.keys() | new.keys())
        if old.get(field) != new.get(field) and not f"{field}.".startswith(free)
    ]
    changed += [
        f"  {'task: its prompts or answers' if kind == 'task' else f'policy.model: its {kind}'} changed since the run began"
        for kind, digest in saved.fingerprints.items()
        if fingerprints.get(kind) != digest
    ]
    if changed:
        raise ValueError(
            "--resume: the run was started with other settings:\n"
            + "\n".join(changed)
            + f"\nOnly {', '.join(FREE[:-1])} "
            f"and {FREE[-1]} may change; for anything else start a new run with name=..."
        )


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Return whether a full disk caused the error. Libraries and Ray wrap the OSError, or only say that a write failed."""
    while error is not None:
        if re.search("no space left|quota exceeded", str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(folder).free < 2**20
