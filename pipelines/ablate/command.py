"""`cotrain ablate`: the arms of a study, each with every seed, as subprocesses; then one table and one report.

A study can be stopped and started again at any point: what is finished is not run again.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cotrain.config.errors import ConfigError
from cotrain.config.load import to_toml
from cotrain.process.children import follow_parent, two_stage_stop
from cotrain.run.checkpoint import latest_checkpoint
from cotrain.run.console import duration
from cotrain.run.mlflow_store import EXPERIMENT_VARIABLE
from cotrain.run.provenance import FREE_FIELDS, flatten
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from drafters.files import read_object, write_json
from pipelines.ablate.plan import Run, Status, Study, load_study
from pipelines.help import CommandParser
from pipelines.page.record import STUDY

PROGRAM = (sys.executable, "-m", "pipelines.cli")
POLL_S = 0.05

ERROR = re.compile(r"^(?:cotrain: |[\w.]*(?:Error|Exception|Interrupt)\b|.*DIFFERS).*(?:\n[ \t]+\S.*)*", re.MULTILINE)
"""A line of a log that says why a run failed, with the indented lines that belong to it."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Raises ValueError for errors that the user can fix, before anything runs.

    Exit status: 0 all runs are finished, 1 some failed, 130 stopped by the user.
    """
    parser = CommandParser("ablate")
    parser.add_argument("study", metavar="STUDY.toml", help="the study file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the study, for example seeds=[0]")
    parser.add_argument("--dry-run", action="store_true", help="check, show what would run, and stop")
    parsed = parser.parse_intermixed_args(arguments)
    study = load_study(parsed.study, parsed.overrides)
    restore_state(study)
    arms, seeds = len(study.config.arms), len(study.config.seeds)
    print(f"study {study.config.name} in {study.folder}: {arms} arms x {seeds} seeds")
    for run in study.runs:
        print(f"  {run.title}: {next_action(run)}", flush=True)
    _check(study, quick=parsed.dry_run)
    if parsed.dry_run:
        print("no problem found; what has to be downloaded or built, and drafters, are checked when the study starts")
        return 0
    if status := _run_study(study):
        print(f"the same command goes on:\n  cotrain ablate {shlex.join(arguments)}")
    return status


def _check(study: Study, quick: bool) -> None:
    """Check what can be checked before a model loads; quick: without a download. Runs check a drafter of the user themselves."""
    from pipelines.preflight import find_problems

    once = {(run.command, run.name): run for run in study.runs}.values()  # the seeds of an arm have the same problems
    # Their folders may exist, as in a resume, and their drafters may not exist yet.
    found = {run: find_problems(run.config, resume=True, command=run.command, quick=quick) for run in once}
    if problems := [f"{line} (in {run.name!r})" for run, lines in found.items() for line in lines]:
        raise ConfigError(problems)


def _run_study(study: Study) -> int:
    """Run what is not finished and write the report. Returns the exit status."""
    from pipelines.ablate.report import write_study_report

    started = time.monotonic()
    for name in ("logs", "runs", "inits"):
        (study.folder / name).mkdir(parents=True, exist_ok=True)
    save_state(study)
    with two_stage_stop(print, "step") as stopped:
        waiting = [run for run in study.runs if next_action(run) != "finished"]
        for number, run in enumerate(waiting, 1):
            if stopped():
                break
            print(f"[{number}/{len(waiting)}] {run.title} begins; its output is {run.log}", flush=True)
            run.status, run.error = _ended(run, study, stopped)
            save_state(study)
            text = {"finished": "finished", "failed": f"FAILED: {run.error}", "missing": "stopped"}[run.status]
            left = (time.monotonic() - started) / number * (len(waiting) - number)
            print(f"[{number}/{len(waiting)}] {run.title}: {text}, eta {duration(left)}", flush=True)
    page = write_study_report(study.folder)
    print(f"\n{page.read_text()}\nreport: {page.with_suffix('.html')}")
    failed = sum(run.status == "failed" for run in study.trainings)
    end = f"{failed} runs failed" if failed else "all runs finished"
    end = "stopped; everything finished is saved" if stopped() else end
    print(f"{end}, in {duration(time.monotonic() - started)}")
    return 130 if stopped() else bool(failed)


def _ended(run: Run, study: Study, stopped: Callable[[], bool]) -> tuple[Status, str | None]:
    """Execute a run. Returns how it ended, and why if it failed."""
    if run.needs and run.needs.status == "failed":
        return "failed", f"its initialisation {run.needs.name} failed: {run.needs.error}"
    exit_status = execute(run, stopped, study.config.name)
    if exit_status == 0 and is_complete(run):
        if not study.config.keep_checkpoints:  # gigabytes that nothing reads any more
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        return "finished", None
    if stopped():
        return "missing", None
    why = "somebody stopped it" if exit_status == 0 else last_error(run.log, exit_status)
    return "failed", f"{why} (log: {run.log})"


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
    free, changes = set(FREE_FIELDS) - {"steps"}, dict[str, str]()
    for run in study.runs:
        if (path := run.folder / "config.json").is_file():
            old, new = flatten(json.loads(path.read_text())), flatten(run.config.model_dump(mode="json"))
            for field in sorted(old | new):
                if old.get(field) != new.get(field) and field.split(".")[0] not in free:
                    changes.setdefault(f"{field}: {old.get(field)!r} -> {new.get(field)!r}", run.config.name)
    if changes:
        problems = [f"{change} (in {name})" for change, name in changes.items()]
        raise ConfigError([*problems, f"folder: {study.folder} holds runs with the settings above; set name=..."])
    if (study.folder / STUDY).is_file():
        known = {run["folder"]: run for arm in read_object(study.folder / STUDY)["arms"] for run in arm["runs"]}
        for run in study.trainings:
            if ended := known.get(f"runs/{run.config.name}"):
                run.status, run.error = ended["status"], ended["error"]


def next_action(run: Run) -> Literal["finished", "resume", "start"]:
    """What has to be done with a run to finish the study. Raises ValueError while another process runs it."""
    complete = is_complete(run)
    if complete and (run.command == "init" or run.status == "finished"):
        return "finished"
    # A run whose own last check failed would not repeat it after a resume. Without config.json, it was killed at its start.
    if not (run.folder / "config.json").is_file() or (complete and run.status == "failed"):
        return "start"
    with RunDir(run.config.run_root, run.config.name) as run_dir:
        return "resume" if latest_checkpoint(run_dir) else "start"


def is_complete(run: Run) -> bool:
    """Whether an initialisation has made its drafter, or an arm its last step."""
    if run.command == "init":
        return (run.folder / "drafter").exists()
    rows = read_rows(run.folder / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] == run.config.steps


def execute(run: Run, stopped: Callable[[], bool], experiment: str) -> int:
    """Run the subprocess to its end, in this experiment of MLflow, and return its exit status.

    Once `stopped` returns true, it has to save and stop. A second Ctrl-C makes it stop at once.
    """
    resume = ["--resume", run.config.name] if next_action(run) == "resume" else []
    if not resume:
        shutil.rmtree(run.folder, ignore_errors=True)
    config_file = run.log.with_suffix(".toml")
    config_file.write_text(to_toml(run.config), encoding="utf-8")
    with run.log.open("ab") as log:
        # It gets a session of its own, so that Ctrl-C in the terminal reaches only this process, which passes it on once.
        process = subprocess.Popen(
            [*PROGRAM, "train", str(config_file), *resume],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={EXPERIMENT_VARIABLE: experiment} | os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=partial(follow_parent, os.getpid()),
        )
    try:
        while process.poll() is None and not stopped():
            time.sleep(POLL_S)
        process.send_signal(signal.SIGINT)  # it saves and stops; nothing if it has ended
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def last_error(log: Path, status: int) -> str:
    """What a failed run's log says about why it failed: its last error, else its last line."""
    if status < 0:
        killed = signal.Signals(-status).name
        return f"killed by {killed}" + (" (out of memory?)" if killed == "SIGKILL" else "")
    text = log.read_text(errors="replace").rstrip()
    errors = ERROR.findall(text) or text.splitlines() or [f"exit status {status} without output"]
    return " ".join(errors[-1].removeprefix("cotrain: ").split())
