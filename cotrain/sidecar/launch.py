"""The two processes of `cotrain run`: the trainer beside a host, and the host's own command with COTRAIN_SIDECAR set.

The host stays in the terminal's process group, so that it reads the keyboard and gets a Ctrl-C from the terminal. The
trainer has a session of its own and is told to stop when the host has ended, so that each is told to stop only once.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cotrain.process.failures import RunFailure
from cotrain.transport.spool import VARIABLE, Spool

STOP_SECONDS = 120.0  # a trainer that is told to stop finishes its round of training and stores the drafter
CAUSES = """\
none asked for a drafter. Usual causes:
- cotrain is not installed where the host's vLLM is: install it there (docs/guide/sidecar.md)
- the host sets VLLM_PLUGINS, the list of what vLLM may load: add cotrain to it
- the variable COTRAIN_SIDECAR did not reach the engine, which is an actor of Ray or on another machine: docs/guide/sidecar.md
- the host made no engine of vLLM, or ended before"""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def trainer_beside(command: Sequence[str], spool: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the trainer's command beside the body, which begins when engines may be started. Yields the trainer's process.

    After the body, the trainer is told to save and exit, and killed if it has not done so within STOP_SECONDS.
    Raises RunFailure when another trainer is there, or this one ends before engines may be started, and OSError when its
    command is not found.
    """
    if Spool(spool).is_alive():
        raise RunFailure(f"spool: another trainer uses {spool}; stop it, or choose another folder or name")
    trainer = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while not Spool(spool).is_alive():  # it may have to fetch the first drafter, and read from a slow disk
            if trainer.poll() is not None:
                raise RunFailure("the drafter's trainer has ended before it was ready; it says why above")
            time.sleep(0.1)
        yield trainer
        if trainer.poll() is not None:
            print("cotrain: the trainer ended before the host did, see above", file=sys.stderr)
    finally:
        trainer.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(STOP_SECONDS)
        finally:  # a second Ctrl-C does not leave it behind
            trainer.kill()
            trainer.wait()


def run_host(command: Sequence[str], spool: str | Path, **environment: str) -> int:
    """Run the host's command beside a spool to its end, and return its exit status, or 128 + n if signal n ended it.

    A signal that another process sends to this one is forwarded to the host; the terminal itself sends a Ctrl-C to both.
    Raises OSError when the command cannot be started.
    """
    waited = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)  # the host would inherit the blocked ones
    try:
        variables = os.environ | {VARIABLE: str(Path(spool).absolute())} | environment
        host = subprocess.Popen(command, env=variables, preexec_fn=unblock)
        while host.poll() is None:
            received = signal.sigtimedwait(waited, 1.0)
            # si_code is 0 or negative for a signal from a process, and positive for one from the kernel, such as Ctrl-C.
            if received is not None and received.si_signo in FORWARDED and received.si_code <= 0:
                host.send_signal(received.si_signo)
        return host.returncode if host.returncode >= 0 else 128 - host.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
