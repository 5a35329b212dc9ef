"""Policies with layers of linear attention (gated delta nets, as in Qwen3-Next) restrict what can be configured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.files import read_config


def has_linear_attention(model: Path) -> bool:
    """Say whether some layers of the model in this folder keep a state instead of keys and values."""
    return "linear_num_value_heads" in read_config(model)


def training_problems(model: Path, batching: str) -> list[str]:
    """List settings of policy.* that such a model cannot be trained with."""
    if batching != "packed" or not has_linear_attention(model):
        return []
    return ['policy.batching: linear attention reads on from one packed rollout into the next; set "padded"']


def serving_problems(model: Path, on_cpu: bool, dtype: str, dtype_name: str, arguments: Mapping[str, Any]) -> list[str]:
    """List settings that vLLM's CPU build cannot serve such a model with.

    arguments: those of rollout.vllm; dtype_name: where dtype is set.
    """
    if not on_cpu or not has_linear_attention(model):
        return []
    problems = []
    if dtype != "bfloat16":
        problems.append(f"{dtype_name}: vLLM computes linear attention on a CPU in bfloat16 only; set it to bfloat16")
    if arguments.get("enable_prefix_caching"):
        problems.append("rollout.vllm.enable_prefix_caching: for linear attention it needs a GPU; leave it out")
    return problems
