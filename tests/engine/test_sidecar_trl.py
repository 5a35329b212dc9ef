"""TRL's GRPOTrainer with the engine in its own process: the script is unchanged, and the drafter is trained beside it."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cotrain.transport.spool import Spool, State, read_json
from tests.sidecar_parts import host_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,  # test_sidecar_server.py has a host in processes of its own
    pytest.mark.alone,  # its trainer has the lowest priority, and a deadline
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL comes with the dev extra; run `make setup` again"),
]

SCRIPT = str(Path(__file__).parents[2] / "examples" / "trl_grpo.py")
COTRAIN = (sys.executable, "-m", "pipelines.cli")
STEPS = 48
"""A step takes a second, and a round of the trainer five."""
FEW_DRAFTS = 300
# Rounds of a fraction of TRL's step, so that a drafter is there after few of them.
DRAFTER = (
    "drafter.model.draft_vocab_size=128",
    "drafter.batch_tokens=512",
    "drafter.updates_per_step=40",
    "adaptive=false",
    "nice=0",  # so that it learns in time where other tests run beside it
)


class States:
    """What the engines of a host have reported, read while the host runs, since the spool is gone afterwards."""

    def __init__(self, spool: Path):
        self._spool, self.rows = Spool(spool), list[State]()

    def follow(self, host: subprocess.Popen, seconds: float) -> int:
        """Read until the host has ended. Returns its exit status."""
        deadline = time.monotonic() + seconds
        while host.poll() is None and time.monotonic() < deadline:
            states = [read_json(engine.state, State) for engine in self._spool.engines()]
            self.rows += [state for state in states if state and state not in self.rows[-1:]]
            time.sleep(0.1)
        host.kill()
        return host.wait()

    def last_served(self) -> float:
        """Acceptance length of the last drafts, at least FEW_DRAFTS of them."""
        last = self.rows[-1].counts
        first = next(r.counts for r in reversed(self.rows) if r.counts["drafts"] <= last["drafts"] - FEW_DRAFTS)
        return 1 + (last["accepted_tokens"] - first["accepted_tokens"]) / (last["drafts"] - first["drafts"])


def host_log(output: str) -> list[dict[str, Any]]:
    return json.loads(next(line for line in output.splitlines() if line.startswith("LOG ")).removeprefix("LOG "))


def started(folder: Path, command: list[str]) -> subprocess.Popen:
    """Start a command whose output goes to a file in `folder`, and whose MLflow is that of the run root."""
    environment = host_environment(folder, None) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/runs/mlflow.db"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=(folder / "output").open("w"), stderr=subprocess.STDOUT
    )


def test_an_unchanged_script_gets_a_drafter_that_learns(target_folder: Path, mlflow_database: Path) -> None:
    folder = mlflow_database.parents[1]
    command = [*COTRAIN, "run", "--model", "tiny:llama", "name=trl", f"spool={folder}/spool", *DRAFTER]
    states = States(folder / "spool")
    script = [sys.executable, SCRIPT, str(target_folder), str(STEPS), str(folder / "out")]
    host = started(folder, [*command, "--", *script])
    status, output = states.follow(host, 900), (folder / "output").read_text()
    assert status == 0, output[-3000:]
    assert "engines     1 adopted" in output
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in host_log(output) if "reward" in row]
    assert len(gaps) == STEPS and max(gaps) < 0.02  # the engine samples from the weights that TRL has sent
    assert states.rows[-1].policy_version == STEPS
    assert states.rows[-1].reason is None and not states.rows[-1].refused
    assert states.last_served() >= 1.8
    assert (folder / "runs" / "trl" / "report" / "report.html").is_file()
    assert not (folder / "spool").exists()
