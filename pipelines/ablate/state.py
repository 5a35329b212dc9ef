"""The folder of a study: what it was started with, which runs are done, and what to do with the others.

<folder>/<name>/
  study.json     arms, and for every run finished, failed or missing; rewritten after each run
  config.json    what makes results comparable; a study with other settings needs another folder
  configs/       the configuration of each run, as `cotrain train` and `cotrain init` got it
  logs/          the output of each run
  inits/NAME/    made by `cotrain init`
  runs/NAME/     made by `cotrain train`
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal, Self

from filelock import FileLock, Timeout

from cotrain.config.errors import ConfigError
from cotrain.config.files import write_json
from cotrain.config.load import Table
from cotrain.config.schema import RunConfig
from cotrain.run.checkpoint import latest_checkpoint
from cotrain.run.metrics import read_metrics
from cotrain.run.provenance import flatten
from cotrain.run.run_dir import RunDir
from pipelines.ablate.plan import Arm, Study

Status = Literal["finished", "failed", "missing"]
Action = Literal["skip", "resume", "start", "start over"]


class StudyFolder:
    """A study's record on disk. Holds the study's lock from opening to close(); usable as a context manager."""

    def __init__(self, study: Study) -> None:
        """Make the folder, or open it to go on.

        Raises ConfigError when it belongs to a study with other settings, ValueError while another process runs it.
        """
        self.study, self.path = study, study.folder
        for name in ("configs", "logs", "runs", "inits"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / "study.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"folder: {self.path} is being run by another process; wait, or set name=...") from None
        try:
            check_same_study(study)
        except ConfigError:
            self.close()
            raise
        write_json(self.path / "config.json", study.fingerprint())
        self._record = saved_record(study)
        self._write()

    def status(self, arm: Arm, seed: int) -> tuple[Status, str | None]:
        """How the run ended, and its error."""
        return run_status(self._record, self.study, arm, seed)

    def set_status(self, arm: Arm, seed: int, status: Status, error: str | None = None) -> None:
        """Record how a run ended; study.json is whole at any moment."""
        self._record[self.study.run_config(arm, seed).name] = (status, error)
        self._write()

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self) -> None:
        write_json(self.path / "study.json", study_json(self.study, self._record))


Record = dict[str, tuple[Status, str | None]]
"""Run name to how it ended."""


def saved_record(study: Study) -> Record:
    """What study.json says; empty before the first start."""
    path = study.folder / "study.json"
    if not path.is_file():
        return {}
    runs = [run for arm in json.loads(path.read_text())["arms"] for run in arm["runs"]]
    return {Path(run["folder"]).name: (run["status"], run["error"]) for run in runs}


def run_status(record: Record, study: Study, arm: Arm, seed: int) -> tuple[Status, str | None]:
    return record.get(study.run_config(arm, seed).name, ("missing", None))


def study_json(study: Study, record: Record) -> dict[str, Any]:
    """Content of study.json."""
    arms = []
    for arm in study.arms:
        runs = []
        for seed in study.seeds:
            status, error = run_status(record, study, arm, seed)
            folder = f"runs/{study.run_config(arm, seed).name}"
            runs.append({"seed": seed, "folder": folder, "status": status, "error": error})
        fields = ("name", "init", "model", "online", "policy", "draft_tokens", "objective", "speculation")
        arms.append({name: getattr(arm, name) for name in fields} | {"runs": runs})
    return {"name": study.name, "steps": study.shared.steps, "seeds": list(study.seeds), "arms": arms}


def check_same_study(study: Study) -> None:
    """Raise ConfigError when the study's folder was filled with other settings, naming each.

    Arms, initialisations and seeds may be added.
    """
    path = study.folder / "config.json"
    if not path.is_file():
        return
    old: Table = json.loads(path.read_text())
    new: Table = study.fingerprint()
    new["seeds"] = [seed for seed in new["seeds"] if seed in old["seeds"]]
    for section in ("arms", "inits"):
        new[section] = {name: fields for name, fields in new[section].items() if name in old[section]}
    before, after = flatten(old), flatten(json.loads(json.dumps(new)))
    changed = [
        f"{field.removeprefix('shared.')}: {before.get(field, '(not set)')!r} -> {after.get(field, '(not set)')!r}"
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field)
    ]
    if changed:
        raise ConfigError([*changed, f"folder: {study.folder} holds a study with the settings above; set name=..."])


def next_action(config: RunConfig, status: Status) -> Action:
    """What to do with a run on the way to a finished study."""
    folder = config.run_root / config.name
    if status == "finished" and steps_done(folder) == config.steps:
        return "skip"
    if not folder.exists():
        return "start"
    if status == "failed" and steps_done(folder) == config.steps:
        return "start over"  # its own last check failed, which a resume would not repeat
    if not (folder / "run.lock").is_file():
        return "start over"  # killed while the folder was made
    with RunDir.open(config.run_root, config.name) as run_dir:
        return "start over" if latest_checkpoint(run_dir) is None else "resume"


def next_init_action(config: RunConfig) -> Action:
    """What to do with an initialisation; `cotrain init` can resume from any point after its configuration is saved."""
    folder = config.run_root / config.name
    if (folder / "init.json").is_file():
        return "skip"
    if not folder.exists():
        return "start"
    return "resume" if (folder / "config.json").is_file() else "start over"


def clear(config: RunConfig) -> None:
    """Delete a run that cannot be resumed. Raises ValueError while a process still runs it."""
    folder = config.run_root / config.name
    if (folder / "run.lock").exists():
        RunDir.open(config.run_root, config.name).close()
    trash = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(trash, ignore_errors=True)
    os.replace(folder, trash)
    shutil.rmtree(trash)


def steps_done(folder: Path) -> int:
    """Steps in a run's metrics."""
    path = folder / "metrics.jsonl"
    rows = read_metrics(path) if path.is_file() else []
    return int(rows[-1]["step"]) if rows else 0
