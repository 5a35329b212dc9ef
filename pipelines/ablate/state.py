"""How far the runs of a study are, and what to do with each.

<folder>/<name>/
  study.json     arms, and for every run finished, failed or missing; rewritten after each run
  logs/          the output of each run, beside the configuration it got
  inits/NAME/    made by `cotrain init`
  runs/NAME/     made by `cotrain train`
"""

import json
from typing import Literal

from cotrain.config.errors import ConfigError
from cotrain.config.files import write_json
from cotrain.run.checkpoint import latest_checkpoint
from cotrain.run.provenance import FREE_FIELDS, flatten
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from pipelines.ablate.plan import Run, Study, runs_of
from pipelines.page.folders import STUDY, read_object

Action = Literal["finished", "resume", "start", "start over"]


def save_state(study: Study) -> None:
    """Write study.json."""
    arms = []
    for arm in study.arms:
        runs = [
            {"seed": run.config.seed, "folder": f"runs/{run.config.name}", "status": run.status, "error": run.error}
            for run in arm.runs
        ]
        arms.append(arm.fields() | {"runs": runs})
    head = {"name": study.config.name, "steps": study.shared.steps, "seeds": list(study.config.seeds)}
    write_json(study.folder / STUDY, head | {"arms": arms})


def restore_state(study: Study) -> None:
    """Set how the runs ended that study.json knows.

    Raises ConfigError when runs in the study's folder were made with other settings, naming each. Arms,
    initialisations and seeds may be added.
    """
    runs, changes = runs_of(study.arms), dict[str, str]()
    for run in (*study.inits.values(), *runs):
        if not (path := run.folder / "config.json").is_file():
            continue
        old, new = flatten(json.loads(path.read_text())), flatten(run.config.model_dump(mode="json"))
        for field in sorted(old | new):
            decisive = field == "steps" or field.split(".")[0] not in FREE_FIELDS
            if decisive and old.get(field) != new.get(field):
                changes.setdefault(f"{field}: {old.get(field)!r} -> {new.get(field)!r}", run.config.name)
    if changes:
        problems = [f"{change} (in {name})" for change, name in changes.items()]
        raise ConfigError([*problems, f"folder: {study.folder} holds runs with the settings above; set name=..."])
    if (study.folder / STUDY).is_file():
        known = {run["folder"]: run for arm in read_object(study.folder / STUDY)["arms"] for run in arm["runs"]}
        for run in runs:
            ended = known.get(f"runs/{run.config.name}", {})
            run.status, run.error = ended.get("status", "missing"), ended.get("error")


def next_action(run: Run) -> Action:
    """What to do with a run on the way to a finished study. Raises ValueError while another process runs it."""
    if not run.folder.exists():
        return "start"
    complete = is_complete(run)
    if complete and (run.command == "init" or run.status == "finished"):
        return "finished"
    if complete and run.status == "failed":
        return "start over"  # its own last check failed, which a resume would not repeat
    if not all((run.folder / file).is_file() for file in ("run.lock", "config.json")):
        return "start over"  # killed while the folder was made
    with RunDir.open(run.config.run_root, run.config.name) as run_dir:
        return "resume" if run.command == "init" or latest_checkpoint(run_dir) else "start over"


def is_complete(run: Run) -> bool:
    """Whether `cotrain init` has made its drafter, or `cotrain train` its last step."""
    if run.command == "init":
        return (run.folder / "init.json").is_file()
    rows = read_rows(run.folder / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] == run.config.steps
