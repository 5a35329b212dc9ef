"""Children of a killed process: real processes, killed as `kill -9` of a run kills them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotrain.process.children import environment

CHAIN = """
import subprocess, sys, time
from cotrain.process.children import follow_parent
depth, dying = int(sys.argv[1]), sys.argv[2] == "dying"
if dying:
    follow_parent()
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


ORPHAN = """
import multiprocessing, os, sys
from functools import partial
from cotrain.process.children import follow_parent

def child(parent, follow):
    while os.getppid() == parent:
        pass  # until the parent has died, before this process asks to follow it
    follow()
    print("left behind", flush=True)

parent = os.getpid()
if sys.argv[1] == "multiprocessing":
    multiprocessing.get_context("fork").Process(target=child, args=(parent, follow_parent)).start()
elif not os.fork():
    child(parent, partial(follow_parent, parent))
os.kill(parent, 9)
"""


@pytest.mark.parametrize("started_by", ["multiprocessing", "fork"])
def test_a_child_whose_parent_died_before_it_could_follow_dies_too(started_by: str):
    out = subprocess.run([sys.executable, "-c", ORPHAN, started_by], capture_output=True, text=True)
    assert (out.returncode, out.stdout, out.stderr) == (-signal.SIGKILL, "", "")


IN_A_GROUP_OF_ITS_OWN = """
import os
from cotrain.process.children import follow_parent
follow_parent()
follow_parent()
print(os.getpgrp() == os.getpid() != os.getppid())
"""


def test_ctrl_c_reaches_the_controller_alone():
    out = subprocess.run([sys.executable, "-c", IN_A_GROUP_OF_ITS_OWN], capture_output=True, text=True, check=True)
    assert out.stdout == "True\n"


def test_environment_is_as_before_whatever_a_library_has_set(monkeypatch):
    monkeypatch.setenv("COTRAIN_BEFORE", "old")
    before = dict(os.environ)
    with pytest.raises(KeyError), environment({"COTRAIN_BEFORE": "new", "COTRAIN_NEW": "1"}):
        assert (os.environ["COTRAIN_BEFORE"], os.environ["COTRAIN_NEW"]) == ("new", "1")
        os.environ["COTRAIN_OF_A_LIBRARY"] = "1"
        del os.environ["COTRAIN_NEW"]
        raise KeyError
    assert dict(os.environ) == before
