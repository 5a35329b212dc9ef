"""How far the runs of a study are, and what to do with each.

<folder>/<name>/
  study.json     arms, and for every run finished, failed or missing; rewritten after each run
  configs/       the configuration of each run, as `cotrain train` and `cotrain init` got it
  logs/          the output of each run
  inits/NAME/    made by `cotrain init`
  runs/NAME/     made by `cotrain train`
"""

import json
import shutil
from collections.abc import Iterator
from typing import Literal

from cotrain.config.errors import ConfigError
from cotrain.config.schema import RunConfig
from cotrain.run.checkpoint import latest_checkpoint
from cotrain.run.provenance import FREE_FIELDS, flatten
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from pipelines.ablate.plan import Study
from pipelines.ablate.record import ArmRun, Status, StudyRecord, read_record
from pipelines.page.folders import STUDY

Action = Literal["finished", "resume", "start", "start over"]


def study_record(study: Study) -> StudyRecord:
    """All runs of the study, with how those ended that its study.json knows."""
    known: dict[str, ArmRun] = {}
    if (study.folder / STUDY).is_file():
        known = {run.folder: run for arm in read_record(study.folder).arms for run in arm.runs}
    arms = [arm.model_copy(update={"runs": [known.get(run.folder, run) for run in arm.runs]}) for arm in study.arms]
    return StudyRecord(name=study.config.name, steps=study.shared.steps, seeds=list(study.config.seeds), arms=arms)


def check_same_settings(study: Study) -> None:
    """Raise ConfigError when runs in the study's folder were made with other settings, naming each.

    Arms, initialisations and seeds may be added.
    """
    changes: dict[str, str] = {}
    configs = [*study.inits.values(), *(study.run_config(arm, run) for arm in study.arms for run in arm.runs)]
    for config in configs:
        for change in _changed_fields(config):
            changes.setdefault(change, config.name)
    if changes:
        problems = [f"{change} (in {name})" for change, name in changes.items()]
        raise ConfigError([*problems, f"folder: {study.folder} holds runs with the settings above; set name=..."])


def _changed_fields(config: RunConfig) -> Iterator[str]:
    path = config.run_root / config.name / "config.json"
    if not path.is_file():
        return
    old, new = flatten(json.loads(path.read_text())), flatten(config.model_dump(mode="json"))
    for field in sorted(old.keys() | new.keys()):
        free = field != "steps" and field.partition(".")[0] in FREE_FIELDS
        if not free and old.get(field) != new.get(field):
            yield f"{field}: {old.get(field)!r} -> {new.get(field)!r}"


def next_action(config: RunConfig, status: Status) -> Action:
    """What to do with a run on the way to a finished study. Raises ValueError while a process runs it."""
    folder = config.run_root / config.name
    if not folder.exists():
        return "start"
    done = steps_done(config) == config.steps
    if status == "finished" and done:
        return "finished"
    if status == "failed" and done:
        return "start over"  # its own last check failed, which a resume would not repeat
    if not (folder / "run.lock").is_file():
        return "start over"  # killed while the folder was made
    with RunDir(config.run_root, config.name) as run_dir:
        return "start over" if latest_checkpoint(run_dir) is None else "resume"


def next_init_action(config: RunConfig) -> Action:
    """What to do with an initialisation; `cotrain init` can resume from any point after its configuration is saved."""
    folder = config.run_root / config.name
    if not folder.exists():
        return "start"
    if is_made(config):
        return "finished"
    return "resume" if (folder / "config.json").is_file() else "start over"


def is_made(config: RunConfig) -> bool:
    """Whether `cotrain init` has finished."""
    return (config.run_root / config.name / "init.json").is_file()


def clear(config: RunConfig) -> None:
    """Delete a run that cannot be resumed. Raises ValueError while a process still runs it."""
    folder = config.run_root / config.name
    if (folder / "run.lock").exists():
        RunDir(config.run_root, config.name).close()
    shutil.rmtree(folder)


def steps_done(config: RunConfig) -> int:
    """Steps in a run's metrics."""
    path = config.run_root / config.name / "metrics.jsonl"
    rows = read_rows(path) if path.is_file() else []
    return int(rows[-1]["step"]) if rows else 0
