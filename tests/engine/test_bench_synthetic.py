"""`cotrain bench --synthetic` as a user runs it: a policy that a config.json describes, and drafts accepted at given rates."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from cotrain.models import tiny
from cotrain.simulation.system import load_system
from pipelines.simulate.command import main as simulate

pytestmark = pytest.mark.engine

ACCEPT, TOKENS, CONTEXT, BATCHES = 0.7, 64, 40, (1, 4)
SYSTEM = """
system.max_num_seqs = 4
cost = {type = "roofline", gpu = "b200-sxm", model = "Qwen3-8B"}
workload.mean_length = 60
drafter = {acceptance_length = [1.9, 2], k = 2}
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What the command printed, its bench.json, and the file for the simulator."""
    folder = tmp_path_factory.mktemp("synthetic")
    config = tiny._random_model(tiny.NUM_LAYERS).config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    command = [
        *(sys.executable, "-m", "pipelines.cli", "bench", "--synthetic", str(folder / "shape" / "config.json")),
        *("--k", "1", "2", "--batch", *map(str, BATCHES), "--tokens", str(TOKENS), "--context", str(CONTEXT)),
        *("--rounds", "2", "--accept", str(ACCEPT), "--dtype", "float32", "--gpu", "h100-sxm"),
        *("--out", str(folder / "bench"), "--calibrate", str(folder / "measured.toml")),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((folder / "bench" / "bench.json").read_text()), folder / "measured.toml"


def test_steps_are_timed_at_every_batch_and_draft_length(measured: tuple[str, dict[str, Any], Path]) -> None:
    printed, report, _ = measured
    names = ["no speculation", *(f"probabilistic k={k}" for k in range(3))]
    assert [arm["arm"] for arm in report["arms"]] == [f"batch {batch}, {name}" for batch in BATCHES for name in names]
    assert all(arm["ms a step"] > 0 and arm["simulated ms"] > 0 for arm in report["arms"])
    for batch in BATCHES:
        off, stock = (
            min(t["step_ms"] for t in report["turns"] if (t["arm"], t["batch"]) == (arm, batch))
            for arm in ("probabilistic k=0", "no speculation")
        )
        assert 0.2 < off / stock < 5  # the machine may be busy
    assert all(arm["acceptance length"] == 1 for arm in report["arms"] if arm["arm"].endswith(("speculation", "k=0")))
    assert "**No text of this means anything**" in printed and "ms a step" in printed


def test_drafts_are_accepted_at_the_rates_that_were_set(measured: tuple[str, dict[str, Any], Path]) -> None:
    for k in (1, 2):
        turns = [turn for turn in measured[1]["turns"] if turn["k"] == k]
        drafts = sum(turn["num_drafts"] for turn in turns)
        assert drafts > 200
        for position in range(k):
            rate = ACCEPT ** (position + 1)
            accepted = sum(turn["accepted_per_position"][position] for turn in turns)
            assert abs(accepted / drafts - rate) < 4 * (rate * (1 - rate) / drafts) ** 0.5


def test_start_tap_swaps_and_memory_are_measured(measured: tuple[str, dict[str, Any], Path]) -> None:
    notes = "\n".join(measured[1]["notes"])
    for line in (
        r"start of the engine stock: [\d.]+ s\nstart of the engine drafter: [\d.]+ s",
        r"acceptance is set, to lengths of 1\.70 for k=1, 2\.19 for k=2",
        r"tap, 4 of 4 requests, [\d.]+ MiB: a step takes [\d.]+ ms with it and [\d.]+ without, [\d.]+ of them in the hook",
        r"swap of the drafter, [\d.]+ MiB by file: [\d.]+ s",
        r"swap of the policy, [\d.]+ GiB by file: [\d.]+ s, and [\d.]+ before that to write it",
        r"most memory of a rank of drafter: [\d.]+ GiB of the host, 0\.00 of its GPU",
    ):
        assert re.search(line, notes), notes


def test_the_simulator_takes_what_was_measured(
    measured: tuple[str, dict[str, Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report, calibration = measured
    (tmp_path / "system.toml").write_text(SYSTEM)
    cost = load_system([tmp_path / "system.toml", calibration]).cost
    assert (cost.type, cost.gpu, cost.model, cost.drafter) == ("roofline", "h100-sxm", "shape", "drafter")
    assert cost.models["drafter"].source == "config.json of the eagle3 drafter"
    assert {(k, batch) for k, batch, _ in cost.cells} == {(k, batch) for k in range(3) for batch in BATCHES}
    times = cost.step_times()
    for batch in BATCHES:
        ms = median(turn["step_ms"] for turn in report["turns"] if (turn["k"], turn["batch"]) == (2, batch))
        simulated = times.base(2, np.array([float(batch)]))[0] + times.slope(2) * batch * (CONTEXT + TOKENS / 2)
        assert 1e3 * simulated == pytest.approx(ms)
    assert simulate([str(tmp_path / "system.toml"), str(calibration)]) == 0
    assert "a roofline with 12 measured steps (cotrain bench: shape with eagle3" in " ".join(
        capsys.readouterr().out.split()
    )
