"""Runs of the smoke configuration as processes of their own, one of which several test files look at."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from cotrain.process.stopping import descendants
from tests.empty_store import place_empty_store

TIMEOUT_S = 420

STEPS = 7

REPEATABLE = ("configs/smoke.toml", f"steps={STEPS}", "checkpoint.every=1", "checkpoint.keep_last=3")
"""A run whose rows are the same to the last digit, however often it is interrupted: no clock chooses draft lengths or
publications in it."""


def command(root: Path, *arguments: str) -> list[str]:
    """`cotrain train` in this run root, which is given an empty MLflow store."""
    place_empty_store(root)
    return [sys.executable, "-m", "pipelines.cli", "train", *arguments, f"run_root={root}"]


def train(root: Path, *arguments: str) -> str:
    done = subprocess.run(command(root, *arguments), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics_of(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run root of REPEATABLE as `straight`, to its end, with its output in the file `output`.

    It is made by the first test of all processes of this session that asks for it.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    root = shared / "straight"
    with FileLock(shared / "straight.lock"):
        if not (root / "output").exists():
            shutil.rmtree(root, ignore_errors=True)
            output = _run_and_leave_nothing(root)
            (root / "output").write_text(output)
    return root


def _run_and_leave_nothing(root: Path) -> str:
    """Of its processes, no file is left in shared memory or among temporary files."""
    others, started = set(descendants()), set[int]()
    with tempfile.TemporaryDirectory(prefix="cotrain-test-") as temporary:
        process = subprocess.Popen(
            command(root, *REPEATABLE, "name=straight"),
            env=os.environ | {"TMPDIR": temporary}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        with ThreadPoolExecutor(1) as reader:
            output = reader.submit(process.communicate, timeout=TIMEOUT_S)
            while not output.done():
                started |= set(descendants()) - others
                time.sleep(0.05)
        [text, _] = output.result()
        assert process.returncode == 0, text
        assert len(started) > 5
        left = [*Path("/dev/shm").iterdir(), *Path("/tmp").glob("cotrain-*")]
        # A process id stands between other characters than those of the hexadecimal names that vLLM's ranks give their files.
        ids = {file: set(map(int, re.findall(r"(?<![0-9a-f])\d+(?![0-9a-f])", file.name))) for file in left}
        assert not [file for file, found in ids.items() if started & found]
        # torch makes its cache, which all programs share, when it is imported.
        assert not [file for file in Path(temporary).iterdir() if not file.name.startswith("torchinductor_")]
    return text
