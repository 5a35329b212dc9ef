"""Policies of other families than Llama's: what vLLM serves against transformers, and a run with an EAGLE-3 drafter."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import in_own_process
from cotrain.models.loading import RANDOM_MODELS, built
from tests.engine.runs import metrics_of, train

pytestmark = pytest.mark.engine

IN_SHORT = ("qwen3_moe", "phi3", "qwen3_5_vision")
"""Experts; fused tensors; linear attention, with an image encoder around the language model. `make test-long` has the others."""

REFUSED = ("nemotron_h", "lfm2", "minimax_m2")
IMPRECISE = ("deepseek_v3", "glm4_moe_lite")
"""Families with latent attention, whose kernels on a CPU are not as precise."""


@torch.no_grad()
def own_rounding(name: str) -> float:
    """How much the last hidden states of transformers differ between bfloat16 and float32, relative, at most in 9 of 10 rows.

    In bfloat16 a router can choose other experts for a token.
    """
    ids, states = torch.randint(40, 120, (8, 60), generator=torch.Generator().manual_seed(0)), []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(built(f"tiny:{name}"), dtype=dtype).eval()
        states.append(model(ids, output_hidden_states=True).hidden_states[-1].float())
    return ((states[0] - states[1]).norm(dim=-1) / states[0].norm(dim=-1)).quantile(0.9).item()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_SHORT else pytest.mark.long) for name in RANDOM_MODELS]
)
def test_a_family_is_served_as_transformers_computes_it(name: str) -> None:
    row = in_own_process(name, only_first=name in IN_SHORT)
    assert "failed" not in row, row
    assert ("refused" in row) == (name in REFUSED), row
    if "refused" not in row:
        assert row["found"] == row["tensors"] > 10
        precise = row["dtype"] == "float32" and name not in IMPRECISE
        rounding = 2 * own_rounding(name) if row["dtype"] == "bfloat16" else 0.1
        assert row["tap"] is None or row["tap"] < (1e-4 if precise else rounding)
        assert max(row["log_probs"]) < (1e-3 if precise else 0.3)


@pytest.mark.long  # test_trained_families.py has runs of other families
def test_a_run_of_linear_attention_trains_policy_and_drafter(tmp_path: Path) -> None:
    settings = ("policy.model=tiny:qwen3_5", "rollout.dtype=bfloat16", "steps=3")
    output = " ".join(train(tmp_path, "configs/smoke.toml", *settings).split())
    assert "tapped hidden states are the policy's own" in output
    assert "greedy output identical with and without speculation" in output
    rows = metrics_of(tmp_path, "smoke")
    assert [row["versions/policy"] for row in rows] == [0, 1, 2]
    assert any(row["versions/drafter"] for row in rows)
