"""Kills what a killed run has left behind: the processes that Ray itself starts, some of which hang when it dies.

`python reaper.py MARKER PID` waits until the run PID that started it is gone, however it ended, gives its processes a
few seconds to go by themselves, and kills the rest: those that descended from it, and those that carry MARKER in their
environment. One sign alone does not do: Ray's agents write their title over their environment, and what starts between
two looks descends from nobody once its parent is gone. What is older than the reaper is left alone: the run may be part
of a process that started others before, and it may stop without ending.
Needs nothing but the standard library, so that it takes little memory while it waits.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

LOOK_S = 2.0
"""Between two looks at who descends from the run. One takes about 2 ms."""

GRACE_S = 10.0
GIVE_UP_S = 60.0


class Process(NamedTuple):
    """A process id is used again, together with the time of its start it is not."""

    pid: int
    started: int


def live_processes() -> dict[Process, int]:
    """Each with the id of its parent; no zombies, not this process, and none that is older."""
    found = {}
    own_start = status(Path("/proc/self"))[2]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, started = status(folder)
        except OSError:  # it has just ended
            continue
        if state != "Z" and started >= own_start and int(folder.name) != os.getpid():
            found[Process(int(folder.name), started)] = parent
    return found


def status(folder: Path) -> tuple[str, int, int]:
    """(state, id of the parent, clock tick of the start) of the process whose folder in /proc this is."""
    state, parent, *rest = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    return state, int(parent), int(rest[17])


def descendants(live: dict[Process, int], ancestor: int) -> set[Process]:
    """Children of `ancestor`, theirs, and so on."""
    found: set[Process] = set()
    parents = {ancestor}
    while parents:
        children = {process for process, parent in live.items() if parent in parents} - found
        found |= children
        parents = {child.pid for child in children}
    return found


def marked(live: dict[Process, int], marker: str) -> set[Process]:
    """Those that were started with `marker` in their environment."""
    found = set()
    for process in live:
        try:
            if marker.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.add(process)
        except OSError:  # it has just ended, or is another user's
            continue
    return found


def wait_until_orphaned(parent: int) -> set[Process]:
    """Until our stdin is closed, or, should another process hold its other end too, `parent` is not our parent.

    Returns those that descended from it at the last look and before.
    """
    family: set[Process] = set()
    while os.getppid() == parent:
        live = live_processes()
        family = family & live.keys() | descendants(live, parent)
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            break
    return family


def main(marker: str, parent: int) -> None:
    family = wait_until_orphaned(parent)
    orphaned = time.monotonic()
    while time.monotonic() < orphaned + GIVE_UP_S:
        live = live_processes()
        left = family & live.keys() | marked(live, marker)
        if not left:
            return
        if time.monotonic() > orphaned + GRACE_S:
            for process in left:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
