"""Children of a killed process: real processes, killed as `kill -9` of a run kills them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotrain.process import reaper

CHAIN = """
import subprocess, sys, time
from cotrain.process.orphans import die_with_parent
depth, dying = int(sys.argv[1]), sys.argv[2] == "dying"
if dying:
    die_with_parent()
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[3], str(depth - 1), *sys.argv[2:]])
print(depth, __import__("os").getpid(), flush=True)
time.sleep(60)
"""


def start_chain(dying: bool) -> tuple[subprocess.Popen, list[int]]:
    """A process with a child and a grandchild, and the pids of those two."""
    parent = subprocess.Popen(
        [sys.executable, "-c", CHAIN, "2", "dying" if dying else "staying", CHAIN], stdout=subprocess.PIPE, text=True
    )
    lines = dict(parent.stdout.readline().split() for _ in range(3))
    return parent, [int(lines[depth]) for depth in "10"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill(parent: subprocess.Popen) -> None:
    parent.kill()
    parent.wait()


def test_children_and_their_children_die_with_a_killed_process():
    parent, descendants = start_chain(dying=True)
    assert all(is_alive(pid) for pid in descendants)
    kill(parent)
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in descendants):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.01)


def test_without_it_they_stay():
    parent, descendants = start_chain(dying=False)
    kill(parent)
    time.sleep(0.2)
    assert all(is_alive(pid) for pid in descendants)
    for pid in descendants:
        os.kill(pid, signal.SIGKILL)


IN_A_GROUP_OF_ITS_OWN = """
import os
from cotrain.process.orphans import leave_terminal_group
leave_terminal_group()
leave_terminal_group()
print(os.getpgrp() == os.getpid() != os.getppid())
"""


def test_ctrl_c_reaches_the_controller_alone():
    out = subprocess.run([sys.executable, "-c", IN_A_GROUP_OF_ITS_OWN], capture_output=True, text=True, check=True)
    assert out.stdout == "True\n"


@pytest.mark.parametrize("inherits_pipe", [False, True])
def test_the_reaper_kills_what_a_killed_process_leaves(inherits_pipe):
    """A child that ignores SIGTERM and outlives its parent, as Ray's agents may; also one that inherits our end of the
    pipe by whose closing the reaper is told."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    script = f"""
import os, subprocess, sys, time
from cotrain.process.orphans import start_reaper
reaper = start_reaper()
os.set_inheritable(reaper.stdin.fileno(), {inherits_pipe})
child = subprocess.Popen([sys.executable, "-c", {stubborn!r}], env={{}}, start_new_session=True, close_fds=False)
time.sleep({reaper.INTERVAL_S} + 1)
print(child.pid, reaper.pid, flush=True)
time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    processes = [int(pid) for pid in parent.stdout.readline().split()]
    kill(parent)
    deadline = time.monotonic() + 25
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [is_alive(process) for process in processes] == [False, False]


def test_the_reaper_stops_at_once_and_leaves_what_was_there_before_it():
    """A run that stops without ending its process, as one part of a program that has started others before."""
    script = """
import subprocess, sys, time
from cotrain.process.orphans import start_reaper, stop_reaper
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
older = subprocess.Popen(sleep)
time.sleep(0.1)
reaper = start_reaper()
time.sleep(1)
younger = subprocess.Popen(sleep)
started = time.monotonic()
stop_reaper(reaper)
print(older.poll(), younger.wait(), time.monotonic() - started < 5)
older.kill()
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout == "None -9 True\n"
