"""Kills what a killed run has left behind: the processes that Ray itself starts, some of which hang when it dies.

`python reaper.py MARKER PID` waits until the run PID that started it is gone, however it ended, gives its processes a
few seconds to go by themselves, and kills those that still carry MARKER in their environment.
Needs nothing but the standard library, so that it takes little memory while it waits.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 10.0
GIVE_UP_S = 60.0


def processes_with(marker: str) -> Iterator[int]:
    """Ids of the live processes that were started with `marker` in their environment, but not this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and marker.encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:  # it has just ended, or is another user's
            continue


def _wait_until_orphaned(parent: int) -> None:
    """Until our stdin is closed, or, should another process hold its other end too, `parent` is not our parent."""
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1.0)[0]:
        continue


def main(marker: str, parent: int) -> None:
    _wait_until_orphaned(parent)
    orphaned = time.monotonic()
    while (left := list(processes_with(marker))) and time.monotonic() < orphaned + GIVE_UP_S:
        if time.monotonic() > orphaned + GRACE_S:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
