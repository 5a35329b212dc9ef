"""Faults 7 and 9: a run whose drafter trainer dies, and that is resumed from half a checkpoint until the trainer hangs."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from cotrain.run.checkpoint import load_state
from drafters.base import TargetSpec
from drafters.build import load_drafter
from tests.engine.runs import REPEATABLE, STEPS
from tests.engine.test_stopped_runs import assert_nothing_left
from tests.faults.conftest import Fault
from tests.faults.runs import (
    attempt,
    marker,
    message_of,
    newest,
    process_titled,
    rows_of,
    start,
    tokens_lost,
    truncate,
    wait_for_step,
)

pytestmark = pytest.mark.engine

HANG_AFTER_S = 8


@pytest.mark.long  # test_interrupted_run.py has another role that dies
def test_9_a_trainer_that_dies(tmp_path: Path, fault: Fault) -> None:
    process = start(tmp_path, *REPEATABLE, "name=broken")
    wait_for_step(tmp_path / "broken", 3, process)
    os.kill(process_titled("ray::DrafterActor", process), signal.SIGKILL)
    output = message_of(process)
    assert "drafter: its process has died" in output
    assert "drafter.log" in output and "--resume broken" in output
    assert_nothing_left(f"COTRAIN_TEST_MARKER={marker(tmp_path)}")
    fault("9a", "drafter trainer killed", "message naming role, log and --resume", steps=1)


@pytest.mark.long  # test_checkpoint.py has halves of checkpoints, and test_interrupted_run.py half a drafter
def test_7_and_9_half_a_checkpoint_half_a_drafter_and_a_trainer_that_hangs(
    undisturbed: Path, target_folder: Path, tmp_path: Path, fault: Fault
) -> None:
    """In a copy of a run, as if it had been killed in its last step."""
    root = shutil.copytree(undisturbed.parent, tmp_path / "broken-trainer", symlinks=True)
    run = root / undisturbed.name
    shutil.rmtree(newest(run / "checkpoints", "step_*"))
    damaged = newest(run / "checkpoints", "step_*")
    truncate(damaged / "drafter" / "trainer.pt")
    before, since = int(damaged.name.removeprefix("step_")) - 1, attempt(run)
    served = run / "drafters" / f"v{load_state(run / 'checkpoints' / f'step_{before:06d}').versions.drafter:04d}"
    truncate(served / "model.safetensors")
    process = start(root, "--resume", run.name, f"steps={STEPS + 2}", f"cluster.hang_after_s={HANG_AFTER_S}")
    wait_for_step(run, before + 2, process, since)
    load_drafter(served, TargetSpec.from_pretrained(target_folder))  # the engines were started on that folder
    fault("7c", "serving drafter's folder half written, then --resume", "written anew on resume", steps=0)
    os.kill(process_titled("ray::DrafterActor", process), signal.SIGSTOP)
    stopped = time.monotonic()
    output = message_of(process)
    assert f"{damaged.name} is not used: drafter/trainer.pt has" in output
    fault("7d", "drafter half written in the newest checkpoint", "passed over for the one before", steps=0)

    assert f"drafter: no answer for {HANG_AFTER_S} s" in output
    assert "drafter.log" in output and f"--resume {run.name}" in output
    assert time.monotonic() - stopped < HANG_AFTER_S + 30
    assert_nothing_left(f"COTRAIN_TEST_MARKER={marker(root)}")
    fault("9b", "drafter trainer stops answering", f"hang_after_s ({HANG_AFTER_S} s here)", steps=1)

    rows = rows_of(run)
    lost = tokens_lost(rows, rows_of(undisturbed))
    assert len(rows) >= before + 2 == STEPS and lost == 0
    fault("9d", "afterwards: the run resumed", "rows of an undisturbed run", steps=0, tokens_lost=lost)
