"""A whole run through the command line on the smoke configuration, and what can be done with it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulator_run import compared
from cotrain.run.mlflow_store import absolute_uri
from cotrain.run.registry import list_drafters, pull_drafter
from cotrain.simulation.scenario import Scenario
from pipelines.simulate.run_base import recorded, run_system
from tests.engine.conftest import make_requests
from tests.engine.runs import STEPS, TIMEOUT_S, command, metrics_of, straight_run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return straight_run(tmp_path_factory)


@pytest.fixture(scope="module")
def straight(root: Path) -> str:
    """Seven steps in one go; its output."""
    return (root / "output").read_text()


def test_a_run_ends_with_a_summary(straight: str, root: Path) -> None:
    assert re.search(r"step 7/7 .*reward .*accept \d\.\d\d \(exp \d\.\d\d\)  k 3 .*p7 d6", straight)
    assert re.search(
        r"lossless     verified on [\d,]+ sampled tokens, 1\d\d of them speculated \(1 check in this run\); greedy output",
        straight,
    )
    assert "speculation  k=3 at every batch size (fixed)" in straight
    assert "prompts identical" in straight and "DIFFERS" not in straight
    assert f"  report       {root / 'straight/report/report.html'}" in straight
    assert re.search(
        rf"mlflow server --backend-store-uri sqlite:///{root}/mlflow\.db --workers 1$", straight, re.MULTILINE
    )
    assert (root / "straight" / "report" / "acceptance_length.png").is_file()
    rows = metrics_of(root, "straight")
    assert [row["versions/policy"] for row in rows] == list(range(STEPS))
    # What step 1 trains is judged on the rollouts of step 2, and serves from step 3 on.
    assert [row["versions/drafter"] for row in rows] == [0, 0, 1, 2, 3, 4, 5]
    decisions = [json.loads(line) for line in (root / "straight" / "decisions.jsonl").read_text().splitlines()]
    assert [row["step"] for row in decisions if row["kind"] == "published"] == [2, 3, 4, 5, 6, 7]
    assert all(row["rollout/feature_holes"] == 0 for row in rows)
    assert rows[0]["rollout/acceptance_length"] < rows[-1]["rollout/acceptance_length"]
    samples = [line for file in (root / "straight" / "samples").iterdir() for line in file.read_text().splitlines()]
    ended = [row["response"] for row in map(json.loads, samples) if row["finish_reason"] == "stop"]
    assert ended and not any("<|im_end|>" in text for text in ended), "the end of sequence is no part of the text"


def test_what_a_run_recorded_is_the_base_of_a_simulation(straight: str, root: Path) -> None:
    run = recorded(root / "straight")
    for row in metrics_of(root, "straight"):
        part = run.only([row["step"]])
        assert part.engine_steps["num_tokens"].sum() >= row["rollout/generated_tokens"]
        assert 0 < part.busiest[row["step"]] < row["time/generate_s"]
        assert part.drafts["steps"].sum() == row["rollout/num_drafts"] and set(part.engine_steps["k"]) == {3}
    with pytest.raises(ValueError, match=r"k = \[3\] tell nothing of k = 0"):
        assert Scenario(run_system(root / "straight", ["system.max_num_seqs=4"])).speedup
    cells = [[k, n, 5.0 + k] for k in (0, 3) for n in (1, 4)]
    assert Scenario(run_system(root / "straight", ["system.max_num_seqs=4", f"cost.cells={cells}"])).speedup > 0.5
    predicted, measured = compared(root / "straight")
    assert predicted == pytest.approx(measured, rel=0.35), "steps of milliseconds, on a machine that others use"


def test_the_policy_of_a_run_is_evaluated_with_its_drafter(straight: str, root: Path, tmp_path: Path) -> None:
    evaluate = [sys.executable, "-m", "pipelines.cli", "evaluate", str(root / "straight"), "--out", str(tmp_path)]
    held_out = ["validation.task.type=reasoning_gym", "validation.task.name=chain_sum", "validation.num_prompts=8"]
    done = subprocess.run([*evaluate, *held_out], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr + done.stdout
    figures = json.loads((tmp_path / "evaluate.json").read_text())
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert f"reward {figures['reward']:.3f} +- {figures['reward_error']:.3f}" in done.stdout
    assert len(samples) == 8 and figures["reward"] == sum(row["reward"] for row in samples) / 8
    assert figures["acceptance_length"] > metrics_of(root, "straight")[0]["rollout/acceptance_length"] + 0.2


def test_a_used_name_is_refused(straight: str, root: Path) -> None:
    done = subprocess.run(
        command(root, "configs/smoke.toml", "name=straight"), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 2
    assert "name: run 'straight' is already in" in done.stderr and "--resume straight" in done.stderr


def test_resuming_with_another_model_is_refused(straight: str, root: Path) -> None:
    done = subprocess.run(
        command(root, "--resume", "straight", "policy.model=tiny:qwen3"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2
    assert "policy.model" in done.stderr


def test_a_pulled_drafter_serves_in_stock_vllm(
    straight: str, root: Path, tmp_path: Path, target_folder: Path, target_model: Any
) -> None:
    uri = absolute_uri(f"sqlite:///{root}/mlflow.db")
    rows = [row for row in list_drafters(uri) if row.tags["run_name"] == "straight"]
    assert sorted(int(row.tags["drafter_version"]) for row in rows) == [1, 2, 3, 4, 5, 6]
    pulled = tmp_path / "pulled"
    pull_drafter(uri, f"{rows[0].name}/{rows[0].version}", pulled)
    script = f"""
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM({str(target_folder)!r}, dtype="float32", max_model_len=128, enforce_eager=True,
              speculative_config=dict(method="eagle3", model={str(pulled)!r}, num_speculative_tokens=3))
    prompts = [dict(prompt_token_ids=p) for p in {[r.prompt_token_ids for r in make_requests(4)]}]
    out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    print("TOKENS", [list(o.outputs[0].token_ids) for o in out])
"""
    (tmp_path / "stock.py").write_text(script)
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "stock.py")], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    generated = json.loads(done.stdout.split("TOKENS ", 1)[1].splitlines()[0])
    for request, response in zip(make_requests(4), generated, strict=True):
        whole = torch.tensor([request.prompt_token_ids + response])
        with torch.no_grad():
            greedy = target_model(whole).logits[0, len(request.prompt_token_ids) - 1 : -1].argmax(-1)
        assert greedy.tolist() == response
