"""The state of each run of a study (docs/guide/studies.md), what to do with it next, and the subprocess that does it."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cotrain.config.errors import ConfigError
from cotrain.config.load import to_toml
from cotrain.process.children import follow_parent
from cotrain.run.checkpoint import latest_checkpoint
from cotrain.run.mlflow_store import EXPERIMENT_VARIABLE
from cotrain.run.provenance import FREE_FIELDS, flatten
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from drafters.files import read_object, write_json
from pipelines.ablate.plan import Run, Study
from pipelines.page.folders import STUDY

PROGRAM = (sys.executable, "-m", "pipelines.cli")
POLL_S = 0.05
REPORT_S = 30.0
"""How often the newest line of a run's output is shown."""

Action = Literal["finished", "resume", "start", "start over"]


def save_state(study: Study) -> None:
    arms = dict[str, list[dict[str, Any]]]()
    for run in study.trainings:
        ended = {"folder": f"runs/{run.config.name}", "status": run.status, "error": run.error}
        arms.setdefault(run.name, []).append({"seed": run.config.seed} | ended)
    head = {"name": study.config.name, "steps": study.shared.steps, "seeds": list(study.config.seeds)}
    write_json(study.folder / STUDY, head | {"arms": [{"name": arm, "runs": runs} for arm, runs in arms.items()]})


def restore_state(study: Study) -> None:
    """Set the status and the error of each run that study.json lists.

    Raises ConfigError naming every setting that has changed since the runs in the study's folder were made.
    Arms, initialisations and seeds may be added.
    """
    changes = dict[str, str]()
    for run in study.runs:
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
        for run in study.trainings:
            ended = known.get(f"runs/{run.config.name}", {})
            run.status, run.error = ended.get("status", "missing"), ended.get("error")


def next_action(run: Run) -> Action:
    """What has to be done with a run to finish the study. Raises ValueError while another process runs it."""
    if not run.folder.exists():
        return "start"
    complete = is_complete(run)
    if complete and (run.command == "init" or run.status == "finished"):
        return "finished"
    if complete and run.status == "failed":
        return "start over"  # its own last check failed, which a resume would not repeat
    if not all((run.folder / file).is_file() for file in ("run.lock", "config.json")):
        return "start over"  # killed while the folder was made
    with RunDir(run.config.run_root, run.config.name) as run_dir:
        return "resume" if run.command == "init" or latest_checkpoint(run_dir) else "start over"


def is_complete(run: Run) -> bool:
    """Whether `cotrain init` has made its drafter, or `cotrain train` its last step."""
    if run.command == "init":
        return (run.folder / "init.json").is_file()
    rows = read_rows(run.folder / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] == run.config.steps


def execute(run: Run, stopped: Callable[[], bool], experiment: str) -> int:
    """Run the subprocess to its end, in this experiment of MLflow, and return its exit status.

    Once `stopped` returns true, the subprocess is told to save and stop. A second Ctrl-C makes it stop at once.
    """
    action = next_action(run)
    if action == "start over":
        shutil.rmtree(run.folder)
    config_file = run.log.with_suffix(".toml")
    config_file.write_text(to_toml(run.config), encoding="utf-8")
    resume = ["--resume", run.config.name] if action == "resume" else []
    with run.log.open("ab") as log:
        # It gets a session of its own, so that Ctrl-C in the terminal reaches only this process, which passes it on once.
        process = subprocess.Popen(
            [*PROGRAM, run.command, str(config_file), *resume],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={EXPERIMENT_VARIABLE: experiment} | os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=partial(follow_parent, os.getpid()),
        )
    told, shown = False, time.monotonic()
    try:
        while process.poll() is None:
            if time.monotonic() - shown > REPORT_S:
                shown = time.monotonic()
                print("  " + (run.log.read_text(errors="replace").rstrip().splitlines() or ["..."])[-1], flush=True)
            if stopped() and not told:
                process.send_signal(signal.SIGINT)
                told = True
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()
    return process.returncode


def last_error(log: Path, status: int) -> str:
    """What a failed run's log says about why it failed: its last error, with the indented lines that belong to it."""
    if status < 0:
        killed = signal.Signals(-status).name
        return f"killed by {killed}" + (" (out of memory?)" if killed == "SIGKILL" else "")
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for i, line in reversed(list(enumerate(lines))):
        if re.match(r"cotrain: |[\w.]*(Error|Exception|Interrupt)\b", line) or "DIFFERS" in line:
            indented = itertools.takewhile(lambda more: more[0].isspace(), lines[i + 1 :])
            return " ".join([line.removeprefix("cotrain: "), *(more.strip() for more in indented)])
    return lines[-1] if lines else f"exit status {status} without output"
