"""Folders in shared memory for weights and features in transit, and the removal of those whose owner was killed.

The owner of a folder holds a lock on a file in it. Unlike a process id, a lock is not shared with an earlier process of
the same number or with another container that sees the same /dev/shm.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_NAME = ".owner"
PREFIX = "cotrain-"


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """A fresh folder in shared memory, removed at the end. Leftovers of processes that are gone are removed first.

    Raises OSError when neither /dev/shm nor the temporary folder can be written.
    """
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    for lock_file in base.glob(f"{PREFIX}*/{LOCK_NAME}"):
        with suppress(OSError), lock_file.open("r+") as lock:  # gone, locked, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))  # hidden from the clean-up above until it is locked
    with (folder / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = folder.rename(base / f"{PREFIX}{name}-{os.getpid()}-{folder.name.removeprefix('.' + PREFIX)}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
