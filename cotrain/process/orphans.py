"""No process outlives the run: children of children die with their parent, even when it is killed."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux).

    Every process that Ray or vLLM starts for a run calls this. Without it, `kill -9` of the run leaves vLLM's engine
    core and workers behind, holding memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def leave_terminal_group() -> None:
    """Move to a process group of its own, so that Ctrl-C reaches the controller alone and it can finish its step."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def start_reaper() -> "subprocess.Popen[bytes]":
    """Have all that this process starts from now on killed after its death.

    Ray's own processes need this, because we cannot call `die_with_parent` in them. See reaper.py.
    """
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("reaper.py")), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_reaper(reaper: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of the processes that were started since `start_reaper`."""
    reaper.communicate(b"stop\n")
