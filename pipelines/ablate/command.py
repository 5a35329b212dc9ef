"""`cotrain ablate`: the arms of a study, each with every seed, as subprocesses; then one table and one report.

initialisations (`cotrain init`, once each) --> arm x seed (`cotrain train`) --> study.json --> report, MLflow

A study can be stopped and started again at any point: what is finished is not run again.
"""

import argparse
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from filelock import FileLock, Timeout

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.config.schema import RunConfig
from cotrain.run.console import duration
from pipelines.ablate.jobs import PROGRAM, Ended, Job, Stop, last_error, run_jobs
from pipelines.ablate.plan import Study, load_study
from pipelines.ablate.record import Arm, ArmRun, Status
from pipelines.ablate.state import (
    Action,
    check_same_settings,
    clear,
    is_made,
    next_action,
    next_init_action,
    steps_done,
    study_record,
)

EPILOG = """\
  cotrain ablate configs/studies/initialisation/study.toml --dry-run
  cotrain ablate configs/studies/initialisation/study.toml --only "generic, frozen" "generic, co-trained" seeds=[0]

The same command goes on with a study that was stopped. docs/studies.md explains the file.
"""


def main(arguments: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Run the command. Raises ValueError for what the user can mend, before anything runs.

    `program` runs the subcommands train and init. Exit status: 0 all selected runs are finished, 1 some failed,
    130 stopped by the user.
    """
    parsed = _parser().parse_intermixed_args(arguments)
    if parsed.parallel < 1:
        raise ValueError(f"--parallel: must be at least 1, got {parsed.parallel}")
    study = load_study(parsed.study, parsed.overrides)
    arms = _selected(study, parsed.only)
    check_same_settings(study)
    print("\n".join(_plan(study, arms, parsed.parallel)), flush=True)
    if parsed.dry_run:
        from pipelines.preflight import quick_problems

        if problems := quick_problems(study.shared, resume=True):
            raise ConfigError(problems)
        print("no problem found; models, data and drafters are checked when the study starts")
        return 0
    _check(study, arms)
    study.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(study.folder / "study.lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(f"folder: {study.folder} is being run by another process; wait, or set name=...") from None
    with lock:
        status = _Ablation(study, arms, parsed.parallel, program).run()
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


def _selected(study: Study, only: Sequence[str]) -> list[str]:
    """Names of the arms to run."""
    names = [arm.name for arm in study.arms]
    for name in only:
        if name not in names:
            raise ValueError(f"--only: there is no arm {name!r}{did_you_mean(name, names) or f'; arms: {names}'}")
    return list(only) or names


def _plan(study: Study, selected: Sequence[str], parallel: int) -> Iterator[str]:
    """What would run, with what is done already."""
    arms = [arm for arm in study_record(study).arms if arm.name in selected]
    yield f"study {study.config.name} in {study.folder}: {len(arms)} arms x {len(study.config.seeds)} seeds"
    for name in _needed_inits(study, arms):
        yield f"  init   {name}: {next_init_action(study.inits[name])}, {study.inits[name].init.tokens:,} tokens"
    for arm in arms:
        what = (
            f"init {arm.init}, k {arm.num_speculative_tokens}, {arm.objective}" if arm.speculation else "no speculation"
        )
        actions = (f"seed {run.seed} {next_action(study.run_config(arm, run), run.status)}" for run in arm.runs)
        yield f"  arm    {arm.name} ({what}): {', '.join(actions)}"
    if parallel > 1:
        yield f"  {parallel} runs at a time share memory and cores; speeds of such runs are not comparable"


def _needed_inits(study: Study, arms: Sequence[Arm]) -> list[str]:
    return [name for name in study.inits if any(arm.init == name for arm in arms)]


def _check(study: Study, selected: Sequence[str]) -> None:
    """What can be checked before a model loads; a drafter given by the user is checked by the runs themselves."""
    from pipelines.preflight import check_run

    problems: dict[str, str] = {}
    for name in selected:
        try:
            check_run(study.arm_configs[name], resume=True)  # an arm is never run under a name of its own
        except ConfigError as error:
            for line in error.problems:
                problems.setdefault(line, name)
    if problems:
        raise ConfigError([f"{line} (in arm {name!r})" for line, name in problems.items()])


class _Ablation:
    """One run of the command on a locked study folder."""

    def __init__(self, study: Study, selected: Sequence[str], parallel: int, program: Sequence[str]) -> None:
        from pipelines.ablate.tracking import StudyRun

        for name in ("configs", "logs", "runs", "inits"):
            (study.folder / name).mkdir(exist_ok=True)
        self.study, self.parallel, self.program = study, parallel, program
        self.record = study_record(study)
        self.arms = [arm for arm in self.record.arms if arm.name in selected]
        self.parent = StudyRun(study)
        self.stop = Stop()
        self.init_errors: dict[str, str] = {}
        self.left = 0
        self.seconds: list[float] = []
        self.record.write(study.folder)

    def run(self) -> int:
        """Returns the exit status of the command."""
        started = time.monotonic()
        with ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.signal(number, self.stop))
            run_jobs(list(self._init_jobs()), self.parallel, self.stop, self.program)
            if not self.stop.requested:
                jobs = list(self._train_jobs())
                self.left = len(jobs)
                run_jobs(jobs, self.parallel, self.stop, self.program)
        self._report()
        failed = [(arm, run) for arm, run in self._runs if run.status == "failed"]
        for arm, run in failed:
            print(f"  {arm.name}, seed {run.seed}: {run.error}")
        took = duration(time.monotonic() - started)
        if self.stop.requested:
            print(f"stopped after {took}; everything finished is kept")
            return 130
        print(f"{len(failed)} runs failed, in {took}" if failed else f"all runs finished, in {took}")
        return 1 if failed else 0

    @property
    def _runs(self) -> list[tuple[Arm, ArmRun]]:
        return [(arm, run) for arm in self.arms for run in arm.runs]

    def _init_jobs(self) -> Iterator[tuple[Job, Ended]]:
        for name in _needed_inits(self.study, self.arms):
            config = self.study.inits[name]
            if (action := next_init_action(config)) != "finished":
                yield self._job(f"init {name}", "init", config, action), self._init_ended

    def _train_jobs(self) -> Iterator[tuple[Job, Ended]]:
        # Seeds outside, arms inside: a study that is stopped early has whole comparisons of fewer seeds.
        for arm, run in sorted(self._runs, key=lambda pair: self.record.seeds.index(pair[1].seed)):
            if arm.init in self.init_errors:
                self._set_status(run, "failed", f"its initialisation {arm.init} failed: {self.init_errors[arm.init]}")
                continue
            config = self.study.run_config(arm, run)
            if (action := next_action(config, run.status)) != "finished":
                yield self._job(f"{arm.name}, seed {run.seed}", "train", config, action), partial(self._arm_ended, run)

    def _job(self, title: str, command: str, config: RunConfig, action: Action) -> Job:
        if action == "start over":
            clear(config)
        file = f"{command}-{config.name}"
        config_file, log = (self.study.folder / path for path in (f"configs/{file}.toml", f"logs/{file}.log"))
        return Job(title, command, config, action == "resume", config_file, log, self.parent.run_id)

    def _init_ended(self, job: Job, status: int, seconds: float) -> None:
        if is_made(job.config):
            print(f"{job.title}: made in {duration(seconds)}", flush=True)
        elif not self.stop.requested:
            self.init_errors[job.config.name] = f"{last_error(job.log, status)} (log: {job.log})"
            print(f"{job.title}: FAILED: {self.init_errors[job.config.name]}", flush=True)

    def _arm_ended(self, run: ArmRun, job: Job, status: int, seconds: float) -> None:
        self.left -= 1
        total, done = len(self._runs), steps_done(job.config)
        if status == 0 and done == job.config.steps:
            self._set_status(run, "finished")
            if not self.study.config.keep_checkpoints:  # gigabytes that nothing reads any more
                shutil.rmtree(job.config.run_root / job.config.name / "checkpoints", ignore_errors=True)
            self.seconds.append(seconds)
            eta = self.left * sum(self.seconds) / len(self.seconds) / self.parallel
            text = f"finished in {duration(seconds)}, eta {duration(eta)}"
        elif self.stop.requested:
            self._set_status(run, "missing")
            text = f"stopped after step {done}"
        else:
            why = f"somebody stopped it after step {done}" if status == 0 else last_error(job.log, status)
            self._set_status(run, "failed", f"{why} (log: {job.log})")
            text = f"FAILED: {run.error}"
        print(f"[{total - self.left}/{total}] {job.title}: {text}", flush=True)

    def _set_status(self, run: ArmRun, status: Status, error: str | None = None) -> None:
        run.status, run.error = status, error
        self.record.write(self.study.folder)

    def _report(self) -> None:
        from pipelines.ablate.report import write_study_report

        page = write_study_report(self.study.folder)
        table = page.with_name("table.md")
        finished = all(run.status == "finished" for arm in self.record.arms for run in arm.runs)
        if error := self.parent.finish(finished, table, page):
            print(f"MLflow did not take the table ({error}); it is in {table}")
        print(f"\n{table.read_text()}\nreport: {page}")
