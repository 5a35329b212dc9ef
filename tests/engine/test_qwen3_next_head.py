"""The native head of a Qwen3-Next checkpoint: trained apart, stitched back, and served by stock vLLM as one model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.base import Sampler, TargetSpec
from drafters.build import load_drafter, stitch, write_head, write_policy
from drafters.config import ObjectiveConfig
from tests.engine.conftest import text_of, weights_of
from tests.engine.test_mtp_run import in_stock_vllm
from tests.native_models import qwen3_next_model, write_native

pytestmark = pytest.mark.engine

DTYPE = "bfloat16"  # vLLM's linear attention on a CPU knows no other


def test_a_trained_head_is_accepted_more_often_and_changes_no_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = write_native(tmp_path / "whole", qwen3_next_model(), "Qwen3NextForCausalLM", trained=True)
    policy, head, trained, out = (tmp_path / name for name in ("policy", "head", "trained", "out"))
    for folder in (policy, head, out):
        folder.mkdir()
    write_policy(whole, policy)
    write_head(whole, head)

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drafter = load_drafter(head, TargetSpec.from_pretrained(policy))
    data, target = text_of(model, ()), weights_of(before)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    for _ in range(60):
        loss = drafter.loss(data, target, Sampler(1.0, 1.0, 0, "greedy"), ObjectiveConfig()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    drafter.save(trained, torch.float32)

    model.to(torch.bfloat16).save_pretrained(policy)
    stitch(policy, trained, head, out)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / file).write_text((whole / file).read_text())
    untrained = in_stock_vllm(whole, 1, DTYPE)
    plain, speculated = in_stock_vllm(out, 0, DTYPE), in_stock_vllm(out, 1, DTYPE)
    assert speculated["tokens"] == plain["tokens"] == untrained["tokens"]
    rates = [found["accepted"] / found["drafts"] for found in (untrained, speculated)]
    assert rates[1] > rates[0] + 0.3
