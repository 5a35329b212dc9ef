"""Runs of the smoke configuration as processes, what one finds in them from outside, and what they leave behind."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.runs import TIMEOUT_S, command

BY_THE_CLOCK = re.compile(r"^time/|^idle/|_s$|tokens_per_s|tap_overhead|swap_seconds|seconds_saved")


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """`cotrain train` with these arguments, its output in one pipe, all its processes marked (see `marker`)."""
    return subprocess.Popen(
        command(root, *arguments),
        env=os.environ | {"COTRAIN_TEST_MARKER": marker(root)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def marker(root: Path) -> str:
    return f"faults-{root.name}"


def message_of(process: subprocess.Popen[str]) -> str:
    """Output of a run that failed; all of it is for a user to read."""
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode not in (0, None), output
    assert "Traceback" not in output, output
    return output


def rows_of(run: Path) -> list[dict[str, Any]]:
    return rows_in(run / "metrics.jsonl")


def rows_in(file: Path) -> list[dict[str, Any]]:
    """Rows that are written whole."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def tokens_lost(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> int:
    """Tokens of the steps wanted that are missing in these rows, doubled, or came out otherwise."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(compared(row))
    return sum(row["rollout/generated_tokens"] for row in wanted if found.get(row["step"]) != [compared(row)])


def compared(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not BY_THE_CLOCK.search(name)}


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], what: str, every_s: float = 0.05) -> Any:
    """The first true value of `condition`, while the run goes on."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        assert process.poll() is None, f"ended before {what}: {process.stdout.read() if process.stdout else ''}"
        time.sleep(every_s)
    raise AssertionError(f"no {what} in {TIMEOUT_S} s")


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str], since: int = 0) -> None:
    """Until the row of `step` is written. since: what `attempt` gave before this process was started."""
    wait_until(lambda: attempt(run) != since and len(rows_of(run)) >= step, process, f"step {step}")


def attempt(run: Path) -> int:
    """Changes when a resume has taken the rows back that it will write again."""
    return (run / "metrics.jsonl").stat().st_ino if (run / "metrics.jsonl").exists() else 0


def wait_for_swap(run: Path, process: subprocess.Popen[str]) -> None:
    """Until new policy weights lie ready, which the engines are sent in the same moment."""

    def written() -> int:
        folders = Path("/dev/shm").glob(f"cotrain-{run.name}-{process.pid}-*")
        return max((f.stat().st_ino for folder in folders for f in folder.glob("policy.safetensors")), default=0)

    before = written()
    wait_until(lambda: written() not in (0, before), process, "swap", every_s=0.002)


def process_titled(title: str, run: subprocess.Popen[str]) -> int:
    """Id of the process with this title among all that the run has started."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # it ended while we looked
    ours = {run.pid}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    titles = {pid: title_of(pid) for pid in ours}
    found = [pid for pid, text in titles.items() if text.startswith(title)]
    assert len(found) == 1, f"{title}: {found} of {titles}"
    return found[0]


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def mlflow_server(database: Path, port: int) -> subprocess.Popen[bytes]:
    """A tracking server of its own; it answers some seconds later."""
    where = ["--backend-store-uri", f"sqlite:///{database}", "--default-artifact-root", str(database.parent)]
    return subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *where, "--port", str(port), "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def resume(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """Continue the run `broken`."""
    return start(root, "--resume", "broken", *arguments)


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern))
