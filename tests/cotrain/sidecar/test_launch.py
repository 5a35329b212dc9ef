"""The host's process and the trainer's: exit status, signals, and what happens when one of them ends early."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from cotrain.process.failures import RunFailure
from cotrain.sidecar.launch import run_host, trainer_beside
from cotrain.transport.spool import VARIABLE, Settings, Spool

ROOT = Path(__file__).parents[3]
SETTINGS = Settings("m", "/m", {}, (1,), 1.0, 1, False)

COUNTING_HOST = """
import pathlib, signal, sys, time
def count(*ignored):
    file.open("a").write("x")
file = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGINT, count)
file.touch()
time.sleep(1.5)  # until after the signal; a handler that returns goes on sleeping
sys.exit(7)
"""
SUPERVISOR = """
import sys
from cotrain.sidecar.launch import run_host
sys.exit(run_host([sys.executable, "-c", sys.argv[1], sys.argv[2]], "/spool"))
"""
TRAINER = """
import signal, sys, time
from cotrain.transport.spool import Settings, Spool
signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(3))
spool = Spool(sys.argv[1])
spool.hold()
spool.create(Settings("m", "/m", {}, (1,), 1.0, 1, False))
time.sleep(60)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


@pytest.mark.parametrize(
    ("code", "status"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137), ("print()", 0)], ids=str
)
def test_the_status_of_the_host_is_returned(code: str, status: int) -> None:
    assert run_host([sys.executable, "-c", f"import os, sys; {code}"], "/spool") == status


def test_the_host_finds_the_spool(tmp_path: Path) -> None:
    code = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['{VARIABLE}'] + os.environ['MORE'])"
    assert run_host([sys.executable, "-c", code], tmp_path, MORE="and more") == 0
    assert (tmp_path / "seen").read_text() == f"{tmp_path}and more"


def test_signals_are_as_they_were_afterwards() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(OSError, match="No such file or directory: '/no/such/command'"):
        run_host(["/no/such/command"], "/spool")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("sent_by", ["terminal", "process"])
def test_a_ctrl_c_reaches_the_host_once(sent_by: str, tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    command = [sys.executable, "-c", SUPERVISOR, COUNTING_HOST, str(counted)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        wait_for(counted)
        if sent_by == "terminal":
            os.write(terminal, b"\x03")
        else:
            os.kill(pid, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        os.close(terminal)
    assert counted.read_text() == "x"


def test_a_trainer_is_waited_for_and_asked_to_stop(tmp_path: Path) -> None:
    with trainer_beside([sys.executable, "-c", TRAINER, str(tmp_path / "spool")], tmp_path / "spool") as trainer:
        assert Spool(tmp_path / "spool").settings() == SETTINGS
        assert os.getsid(trainer.pid) == trainer.pid  # the terminal's Ctrl-C does not reach it
    assert trainer.returncode == 3


def test_no_host_is_started_beside_the_trainer_of_another(tmp_path: Path) -> None:
    other = Spool(tmp_path / "spool")
    other.hold()
    other.create(SETTINGS)
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "spool")]
    with pytest.raises(RunFailure, match="another trainer uses"), trainer_beside(command, tmp_path / "spool"):
        pass


def test_a_trainer_that_fails_at_the_start_is_a_failure_of_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(2)"]
    with pytest.raises(RunFailure, match="before it was ready"), trainer_beside(command, tmp_path):
        pass


def test_a_trainer_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain.sidecar.launch.STOP_SECONDS", 0.2)
    deaf = TRAINER.replace("lambda *ignored: sys.exit(3)", "signal.SIG_IGN")
    with trainer_beside([sys.executable, "-c", deaf, str(tmp_path / "spool")], tmp_path / "spool") as trainer:
        pass
    assert trainer.returncode == -signal.SIGKILL
