"""An in-process engine's output, and that of the processes it starts, goes to a file; the console stays readable."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def engine_output_to(path: Path) -> Iterator[TextIO]:
    """Send what this process and its children print to a file. Yields a stream that still reaches the console."""
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
