"""`cotrain ablate`: the arms of a study, each with every seed, as subprocesses; then one table and one report.

A study can be stopped and started again at any point: what is finished is not run again.
"""

import argparse
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

from filelock import FileLock, Timeout

from cotrain.config.errors import ConfigError
from cotrain.process.children import two_stage_stop
from cotrain.run.console import duration
from pipelines.ablate.jobs import execute, is_complete, last_error, next_action, restore_state, save_state
from pipelines.ablate.plan import Run, Status, Study, load_study


def main(arguments: Sequence[str]) -> int:
    """Run the command. Raises ValueError for errors that the user can fix, before anything runs.

    Exit status: 0 all runs are finished, 1 some failed, 130 stopped by the user.
    """
    parser = argparse.ArgumentParser(
        prog="cotrain ablate",
        description="Run the arms of a study, each with every seed, and compare them in one table.",
        epilog="The same command goes on with a study that was stopped. docs/guide/studies.md explains the file.",
    )
    parser.add_argument("study", metavar="STUDY.toml", help="the study file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the study, for example seeds=[0]")
    parser.add_argument("--dry-run", action="store_true", help="check, show what would run, and stop")
    parsed = parser.parse_intermixed_args(arguments)
    study = load_study(parsed.study, parsed.overrides)
    restore_state(study)
    print("\n".join(_plan(study)), flush=True)
    if parsed.dry_run:
        from pipelines.preflight import find_problems

        if problems := find_problems(study.shared, resume=True, quick=True):
            raise ConfigError(problems)
        print("no problem found; what has to be downloaded or built, and drafters, are checked when the study starts")
        return 0
    _check(study)
    study.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(study.folder / "study.lock", timeout=0):
            status = _run_study(study)
    except Timeout:
        raise ValueError(f"folder: {study.folder} is being run by another process; wait, or set name=...") from None
    if status:
        print(f"the same command goes on:\n  cotrain ablate {shlex.join(arguments)}")
    return status


def _plan(study: Study) -> Iterator[str]:
    """Lines of text: every run of the study, and what is to be done with it."""
    arms, seeds = len(study.config.arms), len(study.config.seeds)
    yield f"study {study.config.name} in {study.folder}: {arms} arms x {seeds} seeds"
    for run in study.runs:
        tokens = f", {run.config.init.tokens:,} tokens" if run.command == "init" else ""
        yield f"  {run.title}: {next_action(run)}{tokens}"


def _check(study: Study) -> None:
    """Check what can be checked before a model loads. A drafter given by the user is checked by the runs themselves."""
    from pipelines.preflight import check_run

    for run in {run.name: run for run in study.trainings}.values():  # one of each arm
        try:
            check_run(run.config, resume=True)  # its folder may exist, and its drafter may not exist yet
        except ConfigError as error:
            raise ConfigError([f"{line} (in arm {run.name!r})" for line in error.problems]) from None


def _run_study(study: Study) -> int:
    """Run what is not finished and write the report, with the study's folder locked. Returns the exit status."""
    from pipelines.ablate.report import write_study_report

    started = time.monotonic()
    for name in ("logs", "runs", "inits"):
        (study.folder / name).mkdir(exist_ok=True)
    save_state(study)
    with two_stage_stop(print, "step") as stopped:
        _run_all(study, stopped)
    page = write_study_report(study.folder)
    print(f"\n{page.read_text()}\nreport: {page.with_suffix('.html')}")
    failed = [run for run in study.trainings if run.status == "failed"]
    took = duration(time.monotonic() - started)
    if stopped():
        print(f"stopped after {took}; everything finished is kept")
        return 130
    print(f"{len(failed)} runs failed, in {took}" if failed else f"all runs finished, in {took}")
    return 1 if failed else 0


def _run_all(study: Study, stopped: Callable[[], bool]) -> None:
    """Run all runs that are not finished, and record in study.json how each of them ended."""
    waiting, started = [run for run in study.runs if next_action(run) != "finished"], time.monotonic()
    for number, run in enumerate(waiting, 1):
        if stopped():
            return
        print(f"[{number}/{len(waiting)}] {run.title} begins; its output is {run.log}", flush=True)
        run.status, run.error = _ended(run, study, stopped)
        save_state(study)
        text = {"finished": "finished", "failed": f"FAILED: {run.error}", "missing": "stopped"}[run.status]
        left = (time.monotonic() - started) / number * (len(waiting) - number)
        print(f"[{number}/{len(waiting)}] {run.title}: {text}, eta {duration(left)}", flush=True)


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
