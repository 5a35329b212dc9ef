"""Runs of a study as subprocesses: a few at a time, stopped together, and what each of them said at the end."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cotrain.config.load import to_toml
from cotrain.process.orphans import die_with_parent
from cotrain.run.store_uri import PARENT_RUN_VARIABLE
from pipelines.ablate.plan import Run
from pipelines.ablate.state import next_action

PROGRAM = (sys.executable, "-m", "pipelines.cli")
POLL_S = 0.05
MESSAGE_LENGTH = 300


def run_jobs(
    runs: Sequence[Run], parallel: int, stopped: Callable[[], bool], parent: str
) -> Iterator[tuple[Run, int, float]]:
    """Run all in order, `parallel` at a time; yields each that has ended, with its exit status and its seconds.

    Once `stopped` says so, none is started, and running ones are told to save, and waited for. `parent` is the MLflow run
    under which theirs are nested.
    """
    waiting, told = deque(runs), False
    running: dict[subprocess.Popen, tuple[Run, float]] = {}
    try:
        while running or (waiting and not stopped()):
            while waiting and len(running) < parallel and not stopped():
                run = waiting.popleft()
                running[_start(run, parent)] = run, time.monotonic()
            if stopped() and not told:
                told = True
                _interrupt(running)
            for process in [process for process in running if process.poll() is not None]:
                run, started = running.pop(process)
                yield run, process.returncode, time.monotonic() - started
            time.sleep(POLL_S)
    finally:  # a second Ctrl-C ends them
        _interrupt(running)
        for process in running:
            process.wait()


def _interrupt(processes: Iterable[subprocess.Popen]) -> None:
    for process in processes:
        process.send_signal(signal.SIGINT)


def _start(run: Run, parent: str) -> subprocess.Popen:
    action = next_action(run)
    if action == "start over":
        shutil.rmtree(run.folder)
    config_file = run.log.with_suffix(".toml")
    config_file.write_text(to_toml(run.config), encoding="utf-8")
    resume = ["--resume", run.config.name] if action == "resume" else []
    with run.log.open("ab") as log:
        # In a session of its own: Ctrl-C in the terminal reaches this process alone, which hands it on once.
        return subprocess.Popen(
            [*PROGRAM, run.command, str(config_file), *resume],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", PARENT_RUN_VARIABLE: parent},
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
