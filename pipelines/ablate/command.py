"""`cotrain ablate`: the arms of a study, each with every seed, as subprocesses; then one table and one report.

initialisations (`cotrain init`, once each) --> arm x seed (`cotrain train`) --> study.json --> report, MLflow

A study can be stopped and started again at any point: what is finished is not run again.
"""

import argparse
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

from filelock import FileLock, Timeout

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.process.stop_signal import two_stage_stop
from cotrain.run.console import duration
from pipelines.ablate.jobs import is_complete, last_error, next_action, restore_state, run_jobs, save_state
from pipelines.ablate.plan import Arm, Run, Study, load_study, runs_of

EPILOG = """\
  cotrain ablate configs/studies/initialisation/study.toml --dry-run
  cotrain ablate configs/studies/initialisation/study.toml --only "generic, frozen" "generic, co-trained" seeds=[0]

The same command goes on with a study that was stopped. docs/studies.md explains the file.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before anything runs.

    Exit status: 0 all selected runs are finished, 1 some failed, 130 stopped by the user.
    """
    parsed = _parser().parse_intermixed_args(arguments)
    if parsed.parallel < 1:
        raise ValueError(f"--parallel: must be at least 1, got {parsed.parallel}")
    study = load_study(parsed.study, parsed.overrides)
    arms = _selected(study, parsed.only)
    restore_state(study)
    print("\n".join(_plan(study, arms, parsed.parallel)), flush=True)
    if parsed.dry_run:
        from pipelines.preflight import quick_problems

        if problems := quick_problems(study.shared, resume=True):
            raise ConfigError(problems)
        print("no problem found; models, data and drafters are checked when the study starts")
        return 0
    _check(arms)
    study.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(study.folder / "study.lock", timeout=0):
            status = _run_study(study, arms, parsed.parallel)
    except Timeout:
        raise ValueError(f"folder: {study.folder} is being run by another process; wait, or set name=...") from None
    if status:
        print(f"the same command goes on:\n  cotrain ablate {shlex.join(arguments)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cotrain ablate",
        description="Run the arms of a study, each with every seed, and compare them in one table.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", metavar="STUDY.toml", help="the study file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the study, for example seeds=[0]")
    parser.add_argument("--dry-run", action="store_true", help="check, show what would run, and stop")
    parser.add_argument("--only", nargs="+", metavar="ARM", default=[], help="names of the arms to run (default: all)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default %(default)s)")
    return parser


def _selected(study: Study, only: Sequence[str]) -> list[Arm]:
    names = [arm.name for arm in study.arms]
    for name in only:
        if name not in names:
            raise ValueError(f"--only: there is no arm {name!r}{did_you_mean(name, names) or f'; arms: {names}'}")
    return [arm for arm in study.arms if arm.name in (only or names)]


def _plan(study: Study, arms: Sequence[Arm], parallel: int) -> Iterator[str]:
    """What would run, with what is done already."""
    yield f"study {study.config.name} in {study.folder}: {len(arms)} arms x {len(study.config.seeds)} seeds"
    for run in _needed_inits(arms):
        yield f"  init   {run.config.name}: {next_action(run)}, {run.config.init.tokens:,} tokens"
    for arm in arms:
        about = arm.fields()
        what = f"init {arm.init}, k {about['num_speculative_tokens']}, {about['objective']}"
        actions = (f"seed {run.config.seed} {next_action(run)}" for run in arm.runs)
        yield f"  arm    {arm.name} ({what if about['speculation'] else 'no speculation'}): {', '.join(actions)}"
    if parallel > 1:
        yield f"  {parallel} runs at a time share memory and cores; speeds of such runs are not comparable"


def _needed_inits(arms: Sequence[Arm]) -> list[Run]:
    return list(dict.fromkeys(arm.made_by for arm in arms if arm.made_by))


def _check(arms: Sequence[Arm]) -> None:
    """What can be checked before a model loads; a drafter given by the user is checked by the runs themselves."""
    from pipelines.preflight import check_run

    for arm in arms:
        try:
            check_run(arm.config, resume=True)  # an arm is never run under a name of its own
        except ConfigError as error:
            raise ConfigError([f"{line} (in arm {arm.name!r})" for line in error.problems]) from None


def _run_study(study: Study, arms: Sequence[Arm], parallel: int) -> int:
    """Run what is not finished in the locked folder of the study, and report. Returns the exit status."""
    from pipelines.ablate.report import write_study_report
    from pipelines.ablate.tracking import close_study_run, open_study_run

    started = time.monotonic()
    for name in ("logs", "runs", "inits"):
        (study.folder / name).mkdir(exist_ok=True)
    client, parent = open_study_run(study)
    save_state(study)
    with two_stage_stop(print, "step of each run") as stopped:
        _run_all(study, _needed_inits(arms), parallel, stopped, parent)
        ready = []
        for arm in arms:
            if arm.made_by is None or arm.made_by.status != "failed":
                ready.append(arm)
                continue
            for run in arm.runs:
                run.status, run.error = "failed", f"its initialisation {arm.init} failed: {arm.made_by.error}"
        _run_all(study, runs_of(ready), parallel, stopped, parent)
    save_state(study)
    page = write_study_report(study.folder)
    close_study_run(client, parent, study)
    print(f"\n{page.with_name('table.md').read_text()}\nreport: {page}")
    failed = [run for run in runs_of(arms) if run.status == "failed"]
    for run in failed:
        print(f"  {run.title}: {run.error}")
    took = duration(time.monotonic() - started)
    if stopped():
        print(f"stopped after {took}; everything finished is kept")
        return 130
    print(f"{len(failed)} runs failed, in {took}" if failed else f"all runs finished, in {took}")
    return 1 if failed else 0


def _run_all(study: Study, runs: Sequence[Run], parallel: int, stopped: Callable[[], bool], parent: str) -> None:
    """Run those that are not finished, and keep in study.json how each of them ends."""
    waiting = [run for run in runs if next_action(run) != "finished"]
    seconds: list[float] = []
    for number, (run, status, took) in enumerate(
        run_jobs(waiting, parallel, stopped, parent), len(runs) - len(waiting) + 1
    ):
        if status == 0 and is_complete(run):
            run.status, run.error = "finished", None
            if not study.config.keep_checkpoints:  # gigabytes that nothing reads any more
                shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
            seconds.append(took)
            eta = (len(runs) - number) * sum(seconds) / len(seconds) / parallel
            text = f"finished in {duration(took)}, eta {duration(eta)}"
        elif stopped():
            run.status, run.error, text = "missing", None, "stopped"
        else:
            why = "somebody stopped it" if status == 0 else last_error(run.log, status)
            run.status, run.error = "failed", f"{why} (log: {run.log})"
            text = f"FAILED: {run.error}"
        save_state(study)
        print(f"[{number}/{len(runs)}] {run.title}: {text}", flush=True)
