"""Runs that are killed or stopped: what they leave behind, and that they go on."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine.runs import TIMEOUT_S, command, metrics_of

pytestmark = pytest.mark.engine


def processes_with(marker: str) -> list[str]:
    """Command lines of live processes that carry `marker` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and marker.encode() in (folder / "environ").read_bytes():
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z":
                    found.append((folder / "cmdline").read_text().replace("\0", " ")[:80])
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def assert_nothing_left(marker: str) -> None:
    """But for Ray's idle agents, which try for a minute to report that Ray has gone."""
    deadline = time.monotonic() + 30
    while (left := [p for p in processes_with(marker) if "Agent" not in p]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def start(root: Path, marker: str, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"COTRAIN_TEST_MARKER": marker}
    return subprocess.Popen(
        command(root, *arguments), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def wait_for(file: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_rows(run: Path, num_rows: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        file = run / "metrics.jsonl"
        if file.exists() and len(file.read_text().splitlines()) >= num_rows:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {num_rows} steps in {TIMEOUT_S} s")


def test_ctrl_c_in_the_start_and_in_a_step(tmp_path: Path) -> None:
    """On a dataset. The run is not resumed on another one."""
    run, rows = tmp_path / "smoke", tmp_path / "rows.jsonl"
    sums = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(32)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
    task = ["task=none", "task.type=dataset", f"task.path={rows}", "task.reward=numeric"]
    process = start(tmp_path, "stopped-start", "configs/smoke.toml", "steps=500", "checkpoint.every=2", *task)
    wait_for(
        run / "logs/latest/policy.log", process
    )  # a role that loads; engine and drafter do so too, or have done it
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and f"go on with --resume smoke run_root={tmp_path}" in output
    assert "start of all roles: " not in output and "Traceback" not in output
    assert_nothing_left("COTRAIN_TEST_MARKER=stopped-start")
    assert not [*Path("/dev/shm").glob(f"cotrain-*-{process.pid}-*"), *Path("/tmp").glob(f"cotrain-*-{process.pid}-*")]

    process = start(tmp_path, "stopped-run", "--resume", "smoke", "checkpoint.every=1000")
    wait_for_rows(run, 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "stopping after this step" in output and f"--resume smoke run_root={tmp_path}" in output
    assert_nothing_left("COTRAIN_TEST_MARKER=stopped-run")
    steps = [row["step"] for row in metrics_of(tmp_path, "smoke")]
    assert steps == list(range(1, steps[-1] + 1))
    assert (run / f"checkpoints/step_{steps[-1]:06d}" / "COMPLETE").exists()

    good = rows.read_text()
    rows.write_text(good.replace("31 + 1", "31 + 2"))
    refused = subprocess.run(command(tmp_path, "--resume", "smoke"), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert refused.returncode == 2 and "task: its prompts or answers changed since the run began" in refused.stderr
