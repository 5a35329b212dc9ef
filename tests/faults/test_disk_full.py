"""Fault 15: a run whose disk fills up, on a file system of its own that is full for real."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.runs import REPEATABLE, TIMEOUT_S
from tests.faults.conftest import Fault
from tests.faults.runs import rows_in, tokens_lost

pytestmark = [pytest.mark.engine, pytest.mark.long]  # tests of checkpoints and payloads have full disks

STEPS, FULL_AFTER = 5, 2

SCRIPT = f"""
mount -t tmpfs -o size=256m none "$ROOT" || exit 77
"$PYTHON" -m pipelines.cli train {" ".join(REPEATABLE)} steps={STEPS} name=full run_root="$ROOT" >"$OUT/first" 2>&1 &
run=$!
until [ "$(cat "$ROOT/full/metrics.jsonl" 2>/dev/null | wc -l)" -ge {FULL_AFTER} ]; do
    kill -0 $run 2>/dev/null || break
    sleep 0.05
done
cat /dev/zero >"$ROOT/ballast" 2>/dev/null
wait $run
echo $? >"$OUT/first.status"
cp "$ROOT/full/metrics.jsonl" "$OUT/rows.before"
rm "$ROOT/ballast"
"$PYTHON" -m pipelines.cli train --resume full run_root="$ROOT" >"$OUT/second" 2>&1
echo $? >"$OUT/second.status"
cp "$ROOT/full/metrics.jsonl" "$OUT"
"""


def own_file_system_is_allowed() -> bool:
    unshare = shutil.which("unshare")
    mount = ["-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return unshare is not None and subprocess.run([unshare, *mount], capture_output=True).returncode == 0


@pytest.mark.skipif(not own_file_system_is_allowed(), reason="needs a mount namespace of its own (unshare -rm)")
def test_15_the_disk_is_full(tmp_path: Path, fault: Fault) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    environment = os.environ | {"ROOT": str(root), "OUT": str(tmp_path), "PYTHON": sys.executable}
    subprocess.run(["unshare", "-rm", "bash", "-c", SCRIPT], env=environment, timeout=TIMEOUT_S, check=True)
    first, before = (tmp_path / "first").read_text(), rows_in(tmp_path / "rows.before")
    assert (tmp_path / "first.status").read_text().strip() not in ("", "0"), first
    assert "Traceback" not in first, first
    assert "disk full" in first and "--resume full" in first
    assert FULL_AFTER <= len(before) < STEPS

    second, after = (tmp_path / "second").read_text(), rows_in(tmp_path / "metrics.jsonl")
    assert (tmp_path / "second.status").read_text().strip() == "0", second
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    lost = tokens_lost(after, before)
    assert lost == 0
    fault("15", "run folder's disk full in mid-run", "message; --resume when there is room", steps=1, tokens_lost=lost)
