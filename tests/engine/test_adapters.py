"""A run whose policy trains adapters: what engines serve, a resume to the last digit, and what is exported."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cotrain.models.loading import resolve_model
from pipelines.cli import main
from tests.engine.runs import metrics_of, train

pytestmark = pytest.mark.engine

RUN = (
    "configs/smoke.toml", "steps=4", "checkpoint.every=2", "policy.lora.rank=4", "policy.optimizer.learning_rate=1e-3",
    "policy.kl_coefficient=0.05", "lossless.every=2", "task=none", "task.type=dataset",
    "task.path=configs/studies/pays/prompts.jsonl", "task.reward=configs.studies.pays.wordy:distinct_words",
)  # fmt: skip


def by_no_clock(root: Path, name: str) -> list[dict[str, object]]:
    """Of each row what the policy, its rollouts and the drafter computed."""
    kinds = ("policy/", "versions/", "drafter/loss", "rollout/acceptance", "rollout/response_length")
    rows = metrics_of(root, name)
    return [{key: row[key] for key in row if key.startswith(kinds) and not key.endswith("_s")} for row in rows]


def test_a_run_of_adapters_resumes_to_the_last_digit_and_is_exported(tmp_path: Path) -> None:
    output = train(tmp_path, *RUN, "name=straight")
    assert "prompts identical" in output and "DIFFERS" not in output
    assert [row["versions/policy"] for row in metrics_of(tmp_path, "straight")] == [0, 1, 2, 3]
    train(tmp_path, *RUN, "name=stopped", "steps=2")
    train(tmp_path, "--resume", "stopped", "steps=4")
    rows = by_no_clock(tmp_path, "straight")
    assert rows == by_no_clock(tmp_path, "stopped")
    assert len(rows[0]) > 12 and rows[3]["policy/kl_reference"] > rows[0]["policy/kl_reference"]
    saved = [tmp_path / name / "checkpoints" / "step_000004" / "policy" for name in ("straight", "stopped")]
    assert not (saved[0] / "model.safetensors").exists() and not (saved[0] / "config.json").exists()
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in saved)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(tensor.any() for name, tensor in one.items() if ".lora_B." in name)

    assert main(["export", str(tmp_path / "straight"), str(tmp_path / "adapters")]) == 0
    assert main(["export", str(tmp_path / "straight"), str(tmp_path / "merged"), "--merged"]) == 0
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:llama"), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.tensor([[3, 5, 7, 11]])
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "straight" / "config.json").read_text())["policy"]["lora"]["rank"] == 4
