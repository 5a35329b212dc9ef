"""Whole runs on policies of other families than Llama's, with an EAGLE-3 drafter."""

from pathlib import Path

import pytest

from tests.engine.runs import metrics_of, train

pytestmark = [pytest.mark.engine, pytest.mark.long]  # test_runs.py has a run


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("tiny:qwen3_moe", "float32"), ("tiny:qwen3_5", "bfloat16"), ("tiny:gpt_oss", "float32")],
)
def test_a_run_trains_policy_and_drafter(model: str, dtype: str, tmp_path: Path) -> None:
    settings = (f"policy.model={model}", f"rollout.dtype={dtype}", "steps=2", "checkpoint.every=2")
    output = " ".join(train(tmp_path, "configs/smoke.toml", *settings).split())
    assert "tapped hidden states are the policy's own" in output
    assert "greedy output identical with and without speculation" in output
    rows = metrics_of(tmp_path, "smoke")
    assert [row["versions/policy"] for row in rows] == [0, 1]
    assert any(row["versions/drafter"] for row in rows)
