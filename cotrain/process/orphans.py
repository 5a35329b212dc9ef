"""No process outlives the run: children of children die with their parent, even when it is killed."""

import ctypes
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux).

    Called in every process that Ray or vLLM starts for a run. Without it, `kill -9` of the run leaves vLLM's engine
    core and workers behind, holding memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def start_reaper() -> "subprocess.Popen[bytes]":
    """Have all that this process starts from now on killed some seconds after it has died (see reaper.py).

    For processes that are not ours to call `die_with_parent` in: Ray's. The reaper ends when this one has and
    nothing is left.
    """
    marker = f"COTRAIN_SESSION={uuid.uuid4().hex}"
    environment = {name: value for name, value in os.environ.items() if name != "COTRAIN_SESSION"}
    reaper = subprocess.Popen(
        [sys.executable, "-S", "-E", str(Path(__file__).with_name("reaper.py")), marker, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    os.environ["COTRAIN_SESSION"] = marker.partition("=")[2]
    return reaper


def leave_terminal_group() -> None:
    """Move to a process group of its own, so that Ctrl-C reaches the controller alone and it can finish its step."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
