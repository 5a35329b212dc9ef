"""Faults 7, 8 and 14: one run through the command line that is broken, and resumed to its end.

In the end its rows are those of a run that nothing has happened to.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import load_file

from cotrain.config.load import load_config, write_config
from cotrain.models.loading import resolve_model
from cotrain.process.cluster import free_port
from cotrain.run.checkpoint import find_defect, load_state
from cotrain.run.mlflow_store import connect
from cotrain.run.run_dir import RunDir
from drafters.base import TargetSpec
from drafters.build import build_drafter, load_drafter
from tests.engine.runs import REPEATABLE, STEPS, TIMEOUT_S
from tests.engine.test_stopped_runs import assert_nothing_left
from tests.faults.conftest import Fault
from tests.faults.runs import (
    marker,
    message_of,
    mlflow_server,
    newest,
    process_titled,
    resume,
    rows_of,
    tokens_lost,
    truncate,
    wait_for_step,
    wait_for_swap,
)

# Its runs have several processes, and what is killed has to be killed within a few steps.
pytestmark = [pytest.mark.engine, pytest.mark.alone]

PARTS = ("generate", "lossless", "learn", "swap_policy")
"""What a step's time is made of."""


class TrackingServer:
    """An MLflow server that can be killed and started again on the same database."""

    def __init__(self, folder: Path) -> None:
        self.database, self.port = folder / "server.db", free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, once an earlier one has ended."""
        if self.process is not None:
            self.process.wait()
        self.process = mlflow_server(self.database, self.port)

    def wait(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except (URLError, OSError):
                assert self.process and self.process.poll() is None, "the MLflow server has ended"
                time.sleep(0.1)
        raise AssertionError(f"no MLflow server in {TIMEOUT_S} s")

    def kill(self) -> None:
        """Kill it without waiting for its end, which takes seconds where it waits for a busy disk, as long as steps of the run."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[TrackingServer]:
    server = TrackingServer(root)
    yield server
    server.kill()
    server.process.wait()


def killed_before_its_first_checkpoint(server: TrackingServer, root: Path) -> None:
    """The folder of a run that was killed while it wrote the drafter that the engines start on."""
    values = ["name=broken", f"run_root={root}", f"tracking.uri={server.uri}", "tracking.log_drafters=false"]
    config = load_config(list(REPEATABLE[:1]), [*REPEATABLE[1:], *values])
    assert config.drafter is not None
    with RunDir(root, "broken", resumed=False) as run_dir:
        write_config(config, run_dir.config)
        target = TargetSpec.from_pretrained(resolve_model(config.policy.model))
        build_drafter(config.drafter.model, target, config.seed).save(run_dir.drafter(0), torch.float32)
        truncate(run_dir.drafter(0) / "model.safetensors")


def test_7_14_and_8_half_a_drafter_then_mlflow_goes_and_the_engine_dies_in_a_swap(
    server: TrackingServer, target_folder: Path, root: Path, fault: Fault
) -> None:
    run = root / "broken"
    server.wait()
    killed_before_its_first_checkpoint(server, root)
    process = resume(root)
    wait_for_step(run, 1, process)
    engine = process_titled("VLLM::EngineCore", process)  # before the steps that follow, which are short
    server.kill()
    killed = time.monotonic()
    wait_for_step(run, 3, process)
    elapsed = time.monotonic() - killed
    wait_for_swap(run, process)
    os.kill(engine, signal.SIGKILL)
    output = message_of(process)
    server.start()  # takes some seconds, and the next test needs it

    load_drafter(run / "drafters" / "v0000", TargetSpec.from_pretrained(target_folder))
    fault("7b", "first drafter half written, run killed, --resume", "written anew on resume", steps=0)

    assert "MLflow takes no metrics" in output and "the run goes on" in output
    # No step waits for a server that is gone, which would take MLflow four seconds or more for each.
    assert elapsed - sum(row.get(f"time/{part}_s", 0.0) for row in rows_of(run)[1:] for part in PARTS) < 6
    fault("14a", "MLflow server killed in mid-run", "said at once; the run goes on", steps=1)

    assert "rollout_0.log" in output and "--resume broken" in output
    assert_nothing_left(f"COTRAIN_TEST_MARKER={marker(root)}")
    done = len(rows_of(run))  # the steps are short
    assert [row["step"] for row in rows_of(run)] == list(range(1, done + 1)) and 3 <= done < STEPS
    # A checkpoint is written beside the step that follows.
    assert saved_step(run) in (done - 1, done)
    fault("8", "engine killed in a policy swap", "message naming log and --resume", steps=done + 1 - saved_step(run))


def saved_step(run: Path) -> int:
    folder = newest(run / "checkpoints", "step_*")
    assert find_defect(folder) is None
    return load_state(folder).step


def test_nothing_is_lost_in_the_end(server: TrackingServer, undisturbed: Path, root: Path, fault: Fault) -> None:
    run = root / "broken"
    server.wait()
    process = resume(root)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    lost = tokens_lost(rows_of(run), rows_of(undisturbed))
    assert lost == 0
    saved = [folder / f"checkpoints/step_{STEPS:06d}" for folder in (run, undisturbed)]
    policies = [load_file(folder / "policy/model.safetensors") for folder in saved]
    drafters = [torch.load(folder / "drafter/trainer.pt", weights_only=False)["drafter"] for folder in saved]
    for one, two in (policies, drafters):
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert [row["step"] for row in rows_of(run)] == list(range(1, STEPS + 1))
    client = connect(server.uri)
    (record,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    points = client.get_metric_history(record.info.run_id, "rollout/generated_tokens")
    assert {p.step: p.value for p in points} == {r["step"]: r["rollout/generated_tokens"] for r in rows_of(run)}
    fault("14b", "steps that MLflow had missed", "sent again from metrics.jsonl", steps=0, tokens_lost=lost)
    for name in ("7e", "8b"):
        fault(name, "afterwards: the run resumed", "rows of an undisturbed run", steps=0, tokens_lost=lost)
