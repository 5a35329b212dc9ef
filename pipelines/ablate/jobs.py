"""Runs of a study as subprocesses: a few at a time, stopped together, and what each of them said at the end."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cotrain.config.load import to_toml
from cotrain.config.schema import RunConfig
from cotrain.process.orphans import die_with_parent
from cotrain.run.store_uri import PARENT_RUN_VARIABLE

PROGRAM = (sys.executable, "-m", "pipelines.cli")
POLL_S = 0.05
LAST_BYTES = 64 * 1024
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


class Stop:
    """Whether the user asked for the end; the children hear of every signal."""

    def __init__(self) -> None:
        self.requested = False
        self.running: list[subprocess.Popen] = []

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM are handed on: a run finishes its step and saves at the first, ends at the second."""

        def handle(signum: int, frame: FrameType | None) -> None:
            if not self.requested:
                print("stopping: each run finishes its step and saves; once more to stop at once", flush=True)
            self.requested = True
            for process in self.running:
                process.send_signal(signal.SIGINT)

        previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in previous.items():
                signal.signal(s, handler)


def run_jobs(
    jobs: Sequence[Job],
    parallel: int,
    stop: Stop,
    ended: Callable[[Job, int, float], None],
    program: Sequence[str] = PROGRAM,
) -> None:
    """Run all jobs in order, `parallel` at a time; `ended(job, exit status, seconds)` after each.

    After a stop no further job is started, and the running ones are waited for.
    """
    waiting = deque(jobs)
    running: dict[subprocess.Popen, tuple[Job, float]] = {}
    try:
        while running or (waiting and not stop.requested):
            while waiting and len(running) < parallel and not stop.requested:
                job = waiting.popleft()
                process = _start(job, program)
                running[process] = (job, time.monotonic())
                stop.running.append(process)
                if stop.requested:  # the signal came before the process was in the list
                    process.send_signal(signal.SIGINT)
            for process in [process for process in running if process.poll() is not None]:
                stop.running.remove(process)
                job, started = running.pop(process)
                ended(job, process.returncode, time.monotonic() - started)
            time.sleep(POLL_S)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _start(job: Job, program: Sequence[str]) -> subprocess.Popen:
    job.config_file.write_text(to_toml(job.config), encoding="utf-8")
    resume = ["--resume", job.config.name] if job.resume else []
    with job.log.open("ab") as log:
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which hands it on once.
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
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    for i, line in reversed(list(enumerate(lines))):
        if line.startswith("cotrain: "):
            return " ".join([line.removeprefix("cotrain: "), *(more.strip() for more in lines[i + 1 :])])
        if "DIFFERS" in line or re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line):
            indented = itertools.takewhile(lambda more: more[0].isspace(), lines[i + 1 :])
            return " ".join([line, *(more.strip() for more in indented)])[:MESSAGE_LENGTH]
    return lines[-1] if lines else f"exit status {status} without output"
