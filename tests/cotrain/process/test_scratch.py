"""Scratch folders: their own, removed at the end, and the leftovers of killed processes with them."""

import subprocess
import sys
import tempfile

import pytest

from cotrain.process import scratch
from cotrain.process.scratch import scratch_folder

HOLD = """
import sys, tempfile
from cotrain.process import scratch
scratch.os.access = lambda path, mode: False
tempfile.tempdir = sys.argv[1]
with scratch.scratch_folder("other") as folder:
    (folder / "features.safetensors").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base folder of the test's own instead of /dev/shm."""
    monkeypatch.setattr(scratch.os, "access", lambda path, mode: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_leftovers_of_killed_processes_are_removed_and_live_ones_stay(base):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    theirs = base / other.stdout.readline().strip()
    foreign = base / "cotrain-my-notes"
    foreign.mkdir()
    with scratch_folder("mine"):
        assert (theirs / "features.safetensors").exists(), "its owner is alive"
    other.kill()
    other.wait()
    assert theirs.exists()
    with scratch_folder("mine"):
        assert not theirs.exists()
        assert foreign.exists(), "not made by scratch_folder"


def test_two_folders_of_one_process_live_side_by_side(base):
    with scratch_folder("run") as first, scratch_folder("run") as second:
        assert first != second
        assert first.is_dir()
        assert second.is_dir()
    assert list(base.iterdir()) == []


def test_the_scratch_folder_is_in_shared_memory():
    with scratch_folder("test-of-scratch") as folder:
        assert folder.parent.as_posix() == "/dev/shm"
    assert not folder.exists()
