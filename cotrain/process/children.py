"""The processes that a run starts: their log files, their death with the run, and a stop by signal after a step."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1


def follow_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies (Linux), and leave Ctrl-C to the controller.

    Without it, `kill -9` of the run leaves vLLM's engine core and workers behind, holding memory.
    parent: process id of the parent, which a process of multiprocessing knows by itself.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # which refuses only numbers that are no signal
    if parent is None and (known := multiprocessing.parent_process()) is not None:
        parent = known.pid
    if parent is not None and os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), signal.SIGKILL)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C then reaches only the controller, which finishes its step


class Actor:
    """A process of the run, with its own log file."""

    def __init__(self, log_file: str):
        redirect_output(log_file)
        follow_parent()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the body. Afterwards all are as before, whatever a library has set in the meantime."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def engine_output_to(path: Path) -> Iterator[TextIO]:
    """Redirect what an engine in this process and its children print to a file. Yields a stream to the console."""
    saved = os.dup(1), os.dup(2)
    try:
        redirect_output(path)
        with os.fdopen(os.dup(saved[0]), "w", buffering=1) as console:
            yield console
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def redirect_output(path: str | Path) -> None:
    """Append what this process and its children print to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


@contextmanager
def two_stage_stop(say: Callable[[str], None], unit: str) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether SIGINT or SIGTERM wants a stop after this `unit`. A second acts as it did before."""
    requested, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: Any) -> None:
        if requested.is_set():
            return (before if callable(before) else signal.default_int_handler)(signum, frame)
        requested.set()
        # A thread says it: the signal may have interrupted a print, and Python's buffered files raise when they are re-entered.
        message = f"stopping after this {unit} and saving; once more to stop at once"
        threading.Thread(target=say, args=(message,)).start()

    with handling(handle):
        yield requested.is_set


@contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call this handler at SIGINT and SIGTERM."""
    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, before in previous.items():
            signal.signal(s, before)
