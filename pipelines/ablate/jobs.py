"""Runs of a study as subprocesses: a few at a time, stopped together, and what each of them said at the end."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cotrain.config.load import to_toml
from cotrain.config.schema import RunConfig
from cotrain.process.orphans import die_with_parent
from cotrain.run.mlflow_store import PARENT_RUN_VARIABLE

PROGRAM = (sys.executable, "-m", "pipelines.cli")
POLL_S = 0.05
MESSAGE_LENGTH = 300


@dataclass(frozen=True)
class Job:
    """One `cotrain train` or `cotrain init`."""

    title: str
    command: str
    """train or init."""
    config: RunConfig
    resume: bool
    config_file: Path
    log: Path
    parent_run: str
    """MLflow run of the study."""


Ended = Callable[[Job, int, float], None]
"""Called at the end of a job with the job, its exit status and its seconds."""


class Stop:
    """A handler of SIGINT and SIGTERM, which hands them on: a run finishes its step and saves at the first, ends at the
    second."""

    def __init__(self) -> None:
        self.requested = False
        self.running: list[subprocess.Popen] = []

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not self.requested:
            print("stopping: each run finishes its step and saves; once more to stop at once", flush=True)
        self.requested = True
        for process in self.running:
            process.send_signal(signal.SIGINT)


def run_jobs(jobs: Sequence[tuple[Job, Ended]], parallel: int, stop: Stop, program: Sequence[str] = PROGRAM) -> None:
    """Run all jobs in order, `parallel` at a time. After a stop none is started, and running ones are waited for."""
    waiting = deque(jobs)
    running: dict[subprocess.Popen, tuple[Job, Ended, float]] = {}
    while running or (waiting and not stop.requested):
        while waiting and len(running) < parallel and not stop.requested:
            job, ended = waiting.popleft()
            process = _start(job, program)
            running[process] = (job, ended, time.monotonic())
            stop.running.append(process)
            if stop.requested:  # the signal came before the process was in the list
                process.send_signal(signal.SIGINT)
        for process in [process for process in running if process.poll() is not None]:
            stop.running.remove(process)
            job, ended, started = running.pop(process)
            ended(job, process.returncode, time.monotonic() - started)
        time.sleep(POLL_S)


def _start(job: Job, program: Sequence[str]) -> subprocess.Popen:
    job.config_file.write_text(to_toml(job.config), encoding="utf-8")
    resume = ["--resume", job.config.name] if job.resume else []
    with job.log.open("ab") as log:
        # In a session of its own: Ctrl-C in the terminal reaches this process alone, which hands it on once.
        return subprocess.Popen(
            [*program, job.command, str(job.config_file), *resume],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", PARENT_RUN_VARIABLE: job.parent_run},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def last_error(log: Path, status: int) -> str:
    """What a failed run's log says about why it failed: its last error, with the indented lines that belong to it."""
    if status < 0:
        killed = signal.Signals(-status).name
        return f"killed by {killed}" + (" (out of memory?)" if killed == "SIGKILL" else "")
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for i, line in reversed(list(enumerate(lines))):
        if re.match(r"cotrain: |[\w.]*(Error|Exception|Interrupt)\b", line) or "DIFFERS" in line:
            indented = itertools.takewhile(lambda more: more[0].isspace(), lines[i + 1 :])
            text = " ".join([line.removeprefix("cotrain: "), *(more.strip() for more in indented)])
            return text[:MESSAGE_LENGTH]
    return lines[-1] if lines else f"exit status {status} without output"
