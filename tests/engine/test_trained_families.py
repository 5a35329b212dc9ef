"""Whole runs on policies with experts and with sliding windows: a drafter that is worth its time, resumed, and served by stock vLLM.

Qwen3.5, with its own MTP head, is in test_native_runs.py.
"""

from pathlib import Path

import pytest

from pipelines.cli import main
from tests.engine.native_runs import check_served_by_stock_vllm
from tests.engine.runs import metrics_of, train
from tests.native_models import trained_policy

pytestmark = [pytest.mark.engine, pytest.mark.long]  # test_runs.py has a run

SETTINGS = ("steps=3", "checkpoint.every=3", "drafter.updates_per_step=60", "rollout.max_new_tokens=48")
RUNS = {
    "qwen3_moe": (),
    "qwen3_moe on two ranks": ("rollout.vllm.tensor_parallel_size=2",),
    "gpt_oss": (),
    "qwen3_moe with a block drafter": ("drafter.model.type=dflash",),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_a_drafter_that_speculates(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"policy.model={trained_policy(name.split()[0])}"
    output = " ".join(train(tmp_path, "configs/smoke.toml", model, *SETTINGS, *RUNS[name]).split())
    assert "tapped hidden states are the policy's own" in output
    assert "greedy output identical with and without speculation" in output
    assert "Done: 4 of 4 steps" in train(tmp_path, "--resume", "smoke", "steps=4")
    lengths = [row["rollout/acceptance_length"] for row in metrics_of(tmp_path, "smoke")]
    assert lengths[0] < 1.3 and lengths[-1] > 1.35, lengths  # of drafters that two rounds have trained

    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "smoke"), str(exported)]) == 0
    check_served_by_stock_vllm(exported, "float32", capsys.readouterr().out)
