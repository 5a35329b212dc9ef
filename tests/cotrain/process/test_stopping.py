"""A stop by signal that waits for nothing, in processes of its own; what it leaves is looked for from outside."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotrain.process import stopping
from tests.cotrain.process.test_children import is_alive

NOT_WAITED_FOR = "a library that drops whatever it gets"
BODIES = {
    "a call that awaits nothing": "asyncio.run(blocks())",
    "a library that drops KeyboardInterrupt": "drops_it()",
    "a library that raises something else": "makes_another_of_it()",
    NOT_WAITED_FOR: "drops_everything()",
}
SCRIPT = """
import asyncio, subprocess, sys, threading, time
from cotrain.process import stopping
from cotrain.process.scratch import scratch_folder

stopping.POLITE_SECONDS = 0.5

async def blocks():
    say()
    time.sleep(60)

def drops_it():
    try:
        say()
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(60)

def makes_another_of_it():
    try:
        say()
        time.sleep(60)
    except SystemExit:
        raise SystemExit(1)

def drops_everything():
    while True:
        try:
            say()
            time.sleep(60)
        except BaseException:
            pass

GRANDCHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
try:
    with stopping.stop_at_once() as last_lines, scratch_folder("stopping") as folder:
        last_lines.append("not waited for")
        child = subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        line = f"{folder} {child.pid} {child.stdout.readline().decode()}"
        say = lambda: print(line, end="", file=sys.stderr, flush=True)
        BODY
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(stopping.INTERRUPTED)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("body", BODIES)
def test_a_signal_ends_whatever_was_started_and_removes_its_folder(body: str, sent: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT.replace("BODY", BODIES[body])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            folder, *started = process.stderr.readline().split()
            assert Path(folder).is_dir() and all(is_alive(int(pid)) for pid in started)
            process.send_signal(sent)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()  # one that does not stop would go on without end
    assert process.returncode == 130
    assert output == ("not waited for\n" if body == NOT_WAITED_FOR else "interrupted\n")
    assert not Path(folder).exists()
    deadline = time.monotonic() + 10
    while any(is_alive(int(pid)) for pid in started):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.01)


def test_what_was_there_before_the_body_goes_on() -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(KeyboardInterrupt), stopping.stop_at_once():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_exit_of_the_body_is_no_interrupt() -> None:
    with pytest.raises(SystemExit), stopping.stop_at_once():
        sys.exit(2)


@pytest.mark.parametrize("owner", ["this user", "another user"])
def test_only_files_of_the_named_processes_of_this_user_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    monkeypatch.setattr(stopping, "SHARED_MEMORY", tmp_path)
    files = ["__KMP_REGISTERED_LIB_4711_0", "sem.loky-4711-a1b2", "__KMP_REGISTERED_LIB_47_0", "my-notes-4711", "4711"]
    for file in files:
        (tmp_path / file).touch()
    if owner == "another user":
        monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "4711").stat().st_uid + 1)
    stopping.remove_files_of({4711, 12})
    left = files if owner == "another user" else files[2:]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(left)
