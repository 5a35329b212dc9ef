"""`cotrain ablate`: the arms of a study, each with every seed, as subprocesses; then one table and one report.

initialisations (`cotrain init`, once each) --> arm x seed (`cotrain train`) --> study.json --> report, MLflow parent run

A study can be stopped and started again at any point: what is finished is not run again.
"""

import argparse
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.config.schema import RunConfig
from cotrain.run.console import duration
from cotrain.run.metrics import read_metrics
from pipelines.ablate.jobs import PROGRAM, Job, Stop, last_error, run_jobs
from pipelines.ablate.plan import Arm, Study, load_study
from pipelines.ablate.state import (
    Action,
    StudyFolder,
    check_same_study,
    clear,
    next_action,
    next_init_action,
    run_status,
    saved_record,
    steps_done,
)

if TYPE_CHECKING:
    from pipelines.ablate.tracking import StudyRun

DESCRIPTION = "Run the arms of a study, each with every seed, and compare them in one table."
EPILOG = """\
  cotrain ablate configs/studies/initialisation/study.toml --dry-run
  cotrain ablate configs/studies/initialisation/study.toml seeds=[0]
  cotrain ablate configs/studies/initialisation/study.toml --only "generic, frozen" "generic, co-trained"

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
    selected = _selected(study, parsed.only)
    check_same_study(study)
    command = f"cotrain ablate {' '.join(_quoted(argument) for argument in arguments)}"
    print("\n".join(_plan(study, selected, parsed.parallel)), flush=True)
    if parsed.dry_run:
        from pipelines.preflight import quick_problems

        if problems := quick_problems(study.shared, resume=True):
            raise ConfigError(problems)
        print("no problem found; model, data and drafters are looked at when the study starts")
        return 0
    _check(study, selected)
    with StudyFolder(study) as folder:
        from pipelines.ablate.tracking import StudyRun

        return _Ablation(study, selected, folder, StudyRun(study), parsed.parallel, program, command).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cotrain ablate",
        usage="cotrain ablate STUDY.toml [key=value...] [--dry-run] [--only ARM...] [--parallel N]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", metavar="STUDY.toml", help="the study file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the study, for example seeds=[0]")
    parser.add_argument("--dry-run", action="store_true", help="check, show what would run, and stop")
    parser.add_argument("--only", nargs="+", metavar="ARM", default=[], help="names of the arms to run (default: all)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default %(default)s)")
    return parser


def _quoted(argument: str) -> str:
    return f"'{argument}'" if any(character in argument for character in ' []{}"') else argument


def _selected(study: Study, only: Sequence[str]) -> list[Arm]:
    names = [arm.name for arm in study.arms]
    if unknown := [name for name in only if name not in names]:
        known = ", ".join(repr(name) for name in names)
        raise ConfigError(
            [f"--only: there is no arm {name!r}{did_you_mean(name, names) or f'; arms: {known}'}" for name in unknown]
        )
    return [arm for arm in study.arms if not only or arm.name in only]


def _plan(study: Study, selected: Sequence[Arm], parallel: int) -> list[str]:
    """What would run, with what is done already."""
    record = saved_record(study)
    lines = [f"study {study.name} in {study.folder}: {len(selected)} arms x {len(study.seeds)} seeds"]
    for name in _needed_inits(study, selected):
        lines.append(
            f"  init   {name}: {next_init_action(study.inits[name])}, {study.inits[name].init.tokens:,} tokens"
        )
    for arm in selected:
        what = (
            f"init {arm.init}, {'co-trained' if arm.online else 'frozen'}, {arm.draft_tokens} draft tokens, "
            f"{arm.objective}"
            if arm.speculation
            else "no speculation"
        )
        actions = []
        for seed in study.seeds:
            action = next_action(study.run_config(arm, seed), run_status(record, study, arm, seed)[0])
            actions.append(f"seed {seed}: {'finished' if action == 'skip' else action}")
        lines += [f"  arm    {arm.name}", f"         {what}, {arm.policy} policy; {', '.join(actions)}"]
    lines += [f"  left out of the grid: {text}" for text in study.left_out]
    if parallel > 1:
        address = study.shared.cluster.address
        where = f"share the Ray cluster at {address}" if address else "share this machine: mind its memory and cores"
        lines.append(f"  {parallel} runs at a time {where}; speeds of such runs are not comparable")
    return lines


def _needed_inits(study: Study, selected: Sequence[Arm]) -> list[str]:
    return [name for name in study.inits if any(arm.init == name for arm in selected)]


def _check(study: Study, selected: Sequence[Arm]) -> None:
    """What can be checked before a model loads, for the study and for drafters given by the user."""
    from cotrain.models.loading import resolve_model
    from pipelines.preflight import check_drafter_init, check_drafter_shape, check_run

    check_run(study.shared, resume=True)  # a name of its own it does not need
    model, problems = resolve_model(study.shared.policy.model), []
    for arm in selected:
        if arm.config.drafter is None:
            continue
        made_here = arm.config.drafter.init is None or arm.init in study.inits
        for check in (check_drafter_shape, *(() if made_here else (check_drafter_init,))):
            try:
                check(arm.config, model)
            except ValueError as error:
                lines = error.problems if isinstance(error, ConfigError) else [str(error)]
                problems += [f"arm {arm.name!r}: {line}" for line in lines]
    if problems:
        raise ConfigError(problems)


@dataclass
class _Ablation:
    """One run of the command."""

    study: Study
    selected: list[Arm]
    folder: StudyFolder
    tracking: "StudyRun"
    parallel: int
    program: Sequence[str]
    command: str
    stop: Stop = field(default_factory=Stop)
    arm_seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: int = 0

    def run(self) -> int:
        started = time.monotonic()
        with self.stop.on_signals():
            failed_inits = self._run_inits()
            if not self.stop.requested:
                self._run_arms(failed_inits)
        self._report()
        done = f"{duration(time.monotonic() - started)}"
        if self.stop.requested:
            print(f"stopped after {done}; everything finished is kept. Go on with:\n  {self.command}")
            return 130
        print(f"{len(self.failures)} failed, in {done}" if self.failures else f"all runs finished, in {done}")
        for failure in self.failures:
            print(f"  {failure}")
        if self.failures:
            print(f"the same command runs these again:\n  {self.command}")
        return 1 if self.failures else 0

    def _run_inits(self) -> dict[str, str]:
        """Make what the selected arms need; the errors of those that failed, by name."""
        errors: dict[str, str] = {}
        jobs, names = [], {}
        for name in _needed_inits(self.study, self.selected):
            action = next_init_action(self.study.inits[name])
            if action != "skip":
                job = self._job(f"init {name}", "init", self.study.inits[name], action, f"init-{name}")
                jobs.append(job)
                names[job.title] = name

        def ended(job: Job, status: int, seconds: float) -> None:
            if (job.config.run_root / job.config.name / "init.json").is_file():
                print(f"{job.title}: made in {duration(seconds)}", flush=True)
            elif not self.stop.requested:
                name = names[job.title]
                errors[name] = last_error(job.log, status)
                self.failures.append(f"{job.title}: {errors[name]} (log: {job.log})")
                print(f"{job.title}: FAILED: {errors[name]}", flush=True)

        run_jobs(jobs, self.parallel, self.stop, ended, self.program)
        return errors

    def _run_arms(self, failed_inits: dict[str, str]) -> None:
        jobs: list[Job] = []
        of_job: dict[str, tuple[Arm, int]] = {}
        # Seeds outside, arms inside: a study that is stopped early has whole comparisons of fewer seeds.
        for seed in self.study.seeds:
            for arm in self.selected:
                if arm.init in failed_inits and arm.init in self.study.inits:
                    error = f"its initialisation {arm.init} failed: {failed_inits[arm.init]}"
                    self.folder.set_status(arm, seed, "failed", error)
                    self.failures.append(f"{arm.name}, seed {seed}: {error}")
                    continue
                config = self.study.run_config(arm, seed)
                action = next_action(config, self.folder.status(arm, seed)[0])
                if action != "skip":
                    job = self._job(f"{arm.name}, seed {seed}", "train", config, action, config.name)
                    jobs.append(job)
                    of_job[config.name] = (arm, seed)
        self.left = len(jobs)
        total = len(self.selected) * len(self.study.seeds)

        def ended(job: Job, status: int, seconds: float) -> None:
            self.left -= 1
            self._arm_ended(job, *of_job[job.config.name], status, seconds, f"[{total - self.left}/{total}]")

        run_jobs(jobs, self.parallel, self.stop, ended, self.program)

    def _arm_ended(self, job: Job, arm: Arm, seed: int, status: int, seconds: float, count: str) -> None:
        folder = job.config.run_root / job.config.name
        if status == 0 and steps_done(folder) == job.config.steps:
            self.folder.set_status(arm, seed, "finished")
            if not self.study.keep_checkpoints:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # gigabytes that nothing reads any more
            self.arm_seconds.append(seconds)
            eta = self.left * sum(self.arm_seconds) / len(self.arm_seconds) / self.parallel
            more = f", eta {duration(eta)}" if self.left else ""
            print(f"{count} {job.title}: {_result(folder)}, {duration(seconds)}{more}", flush=True)
        elif self.stop.requested or status == 0:
            self.folder.set_status(arm, seed, "missing")
            print(f"{count} {job.title}: stopped after step {steps_done(folder)}", flush=True)
            if not self.stop.requested:
                self.failures.append(f"{job.title}: was stopped by somebody else after step {steps_done(folder)}")
        else:
            error = last_error(job.log, status)
            self.folder.set_status(arm, seed, "failed", error)
            self.failures.append(f"{job.title}: {error} (log: {job.log})")
            print(f"{count} {job.title}: FAILED: {error}", flush=True)

    def _job(self, title: str, command: str, config: RunConfig, action: Action, file: str) -> Job:
        if action == "start over":
            clear(config)
        return Job(
            title=title,
            command=command,
            config=config,
            resume=action == "resume",
            config_file=self.folder.path / "configs" / f"{file}.toml",
            log=self.folder.path / "logs" / f"{file}.log",
            parent_run=self.tracking.run_id,
        )

    def _report(self) -> None:
        from pipelines.ablate.report import write_study_report

        page = write_study_report(self.folder.path)
        table = page.parent / "table.md"
        statuses = [self.folder.status(arm, seed)[0] for arm in self.study.arms for seed in self.study.seeds]
        if error := self.tracking.finish("failed" not in statuses and "missing" not in statuses, table, page):
            print(f"MLflow did not take the table ({error}); it is in {table}")
        print(f"\n{table.read_text()}\nreport: {page}")


def _result(folder: Path) -> str:
    """Acceptance length and reward over the last third of the steps, as the report has them."""
    rows = read_metrics(folder / "metrics.jsonl")
    rows = rows[-max(1, len(rows) // 3) :]
    parts = []
    for text, metric in (("acceptance length", "rollout/acceptance_length"), ("reward", "policy/reward")):
        if values := [row[metric] for row in rows if row.get(metric) is not None]:
            parts.append(f"{text} {sum(values) / len(values):.2f}")
    return ", ".join(parts) or "no acceptance length measured"
