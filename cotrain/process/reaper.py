"""Kills what a run leaves behind: the processes that Ray itself starts, some of which hang when it dies.

`python reaper.py PID` notes the descendants of the run PID that started it. When that process has ended, however that
came about, its descendants have some seconds to go by themselves; when it says "stop", they are killed at once. A
process that was there before the reaper is left alone, because the run may be part of a program that has started others.
"""

import os
import select
import sys

import psutil

INTERVAL_S = 2.0
"""Between two searches for descendants; one takes about 5 ms."""

GRACE_S = 10.0


def descendants(ancestor: psutil.Process, since: float) -> set[psutil.Process]:
    """All processes that descend from `ancestor` and were started after `since`."""
    try:
        return {process for process in ancestor.children(recursive=True) if process.create_time() >= since}
    except psutil.NoSuchProcess:
        return set()


def main(parent: int) -> None:
    own, run = psutil.Process(), psutil.Process(parent)
    family: set[psutil.Process] = set()
    said = b""
    # The pipe tells of the run's end, unless another process has inherited its other end.
    while os.getppid() == parent and not said:
        family |= descendants(run, own.create_time())
        if select.select([sys.stdin], [], [], INTERVAL_S)[0]:
            said = os.read(sys.stdin.fileno(), 16) or b"ended"
    if said == b"stop\n":
        family |= descendants(run, own.create_time())
    family.discard(own)
    _, left = psutil.wait_procs(family, 0 if said == b"stop\n" else GRACE_S)
    for process in {*left, *(child for one in left for child in descendants(one, own.create_time()))}:
        if process.is_running():
            process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]))
