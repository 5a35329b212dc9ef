"""No process outlives the run: children of children die with their parent, even when it is killed."""

import ctypes
import os
import signal

from cotrain.process.engine_output import redirect_output

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux).

    Actors and the processes of vLLM call this. Without it, `kill -9` of the run leaves vLLM's engine core and workers
    behind, holding memory. Ray's own processes see to it themselves; two idle agents take a minute.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def leave_terminal_group() -> None:
    """Move to a process group of its own, so that Ctrl-C reaches the controller alone and it can finish its step."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def enter_process(log_file: str) -> None:
    """Give an actor's process its own log file and process group, and let it die with its parent."""
    redirect_output(log_file)
    leave_terminal_group()
    die_with_parent()
