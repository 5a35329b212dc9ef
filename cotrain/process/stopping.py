"""A stop by signal that waits for nothing, and what is left of processes: their children, and files of theirs in shared memory."""

import os
import re
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import psutil

from cotrain.process.children import handling
from cotrain.process.scratch import SHARED_MEMORY, remove_scratch_folders

INTERRUPTED = 130  # exit status
POLITE_SECONDS = 3.0
"""After this time, a stop no longer waits for what it has interrupted. Python drops an exception that a signal raises in a callback,
and one that is raised inside an import can leave a lock behind."""

NAMED_AFTER_PROCESS = re.compile(r"(?:__KMP_REGISTERED_LIB_|sem\.loky-)(\d+)[_-]")
"""Files that libiomp5 and joblib make in shared memory, and leave there when their process is killed."""


@contextmanager
def stop_at_once() -> Iterator[list[str]]:
    """Let SIGINT and SIGTERM end the body and all processes that it has started, and then raise KeyboardInterrupt.

    Yields a list for lines that are printed when the process ends without waiting for the body, which then cannot print them.

    asyncio would only cancel its task, which waits for calls that do not await anything, such as the start of an engine; and
    vLLM drops a KeyboardInterrupt in that start, so the body gets a SystemExit.
    """
    stops, ended = threading.Event(), threading.Event()
    others, started, last_lines = descendants(), set[int](), list[str]()

    def leave_unless_ended() -> None:
        if not ended.wait(POLITE_SECONDS):
            end(started.union(descendants()) - others)
            remove_scratch_folders()
            print(*last_lines, sep="\n", flush=True)
            os._exit(INTERRUPTED)

    def handle(signum: int, frame: object) -> None:
        stops.set()
        started.update(descendants())
        threading.Thread(target=leave_unless_ended, daemon=True).start()
        raise SystemExit(INTERRUPTED)

    with handling(handle):
        try:
            yield last_lines
        except BaseException:
            if not stops.is_set():
                raise
            end(started.union(descendants()) - others)
            raise KeyboardInterrupt from None  # Ray makes another SystemExit of it, and a call may fail for what has ended
        finally:
            ended.set()


def end(processes: Collection[int]) -> None:
    """Kill those of these processes that are still there, and remove what they leave in shared memory."""
    for pid in processes:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    remove_files_of(processes)


def remove_files_of(processes: Collection[int]) -> None:
    """Remove the files that carry the number of one of these processes of this user in shared memory."""
    for file in SHARED_MEMORY.glob("*"):
        owner = NAMED_AFTER_PROCESS.match(file.name)
        with suppress(FileNotFoundError):
            if owner and int(owner[1]) in processes and file.stat().st_uid == os.getuid():
                file.unlink()


def descendants() -> set[int]:
    """Return the processes that this one has started, and those that they have started."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
