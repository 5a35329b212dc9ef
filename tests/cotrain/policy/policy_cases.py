"""A tiny random policy, rollouts of it, and a learner for it."""

import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, multiprocessing
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cotrain.config.schema import OptimizerConfig, PolicyConfig, RolloutConfig
from cotrain.policy.learner import PolicyLearner
from cotrain.policy.sharding import whole_tensors
from cotrain.records import Rollout, ScoredRollout, Versions

VOCAB = 128
ROLLOUT = RolloutConfig(
    prompts_per_step=3, samples_per_prompt=4, temperature=0.8, max_prompt_tokens=12, max_new_tokens=12, dtype="float32"
)
EXPERTS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""What Qwen3-Next has besides."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, schedule="cosine")


def save_tiny_model(folder: Path, kind: str = "qwen3", **sizes: int) -> str:
    """kind: qwen3 (tied embeddings), llama (untied) or qwen3_next (experts, linear attention)."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.15,
        "tie_word_embeddings": kind == "qwen3",
        **sizes,
    }
    kinds = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**shape, **EXPERTS)),
    }
    model = kinds[kind]()
    model.save_pretrained(folder)
    return str(folder)


@cache
def plain_model(model_path: str) -> PreTrainedModel:
    """The model as Hugging Face runs it, to compare with; shared, so do not change it."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def token_log_probs(model_path: str, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Log-probs of the response, one forward pass of this rollout alone."""
    with torch.no_grad():
        logits = plain_model(model_path)(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(response)), response]


def make_rollouts(model_path: str, seed: int = 0, noise: float = 0.2, zero_group: bool = True) -> list[ScoredRollout]:
    """Random tokens of mixed lengths, with the policy's own log-probs plus noise as the engine's."""
    generator = random.Random(seed)
    rollouts = []
    for group in range(ROLLOUT.prompts_per_step):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 12))]
        for sample in range(ROLLOUT.samples_per_prompt):
            response = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 12))]
            own = token_log_probs(model_path, prompt, response, ROLLOUT.temperature).tolist()
            log_probs = [log_prob + generator.gauss(0, noise) for log_prob in own] if noise else own
            advantage = 0.0 if zero_group and group == 0 else generator.gauss(0, 1)
            rollout = Rollout(f"p{group}", sample, prompt, response, log_probs, "", "length", Versions(0, 0))
            rollouts.append(ScoredRollout(rollout, reward=0.0, advantage=advantage))
    return rollouts


def make_learner(model_path: str, rollout: RolloutConfig = ROLLOUT, **policy: Any) -> PolicyLearner:
    """policy: fields of PolicyConfig that differ from the case's."""
    config = PolicyConfig.model_validate({"model": "tiny", "optimizer": OPTIMIZER, **policy})
    return PolicyLearner(config, rollout, model_path, total_steps=6)


def free_ports(count: int) -> list[int]:
    """TCP ports on loopback that nothing listens on, all of them different."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def run_ranks(run_rank: Callable[..., None], *arguments: Any, seconds: float) -> None:
    """Run run_rank(rank, *arguments) in two processes. The test fails when they take longer."""
    ranks = multiprocessing.spawn(run_rank, args=arguments, nprocs=2, join=False)
    deadline = time.monotonic() + seconds
    while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
        if time.monotonic() > deadline:  # ranks that wait for each other would do so for gloo's 30 minutes
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"the two learner processes did not finish in {seconds:.0f} s")


def update_difference(model_path: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference between two learners' updates, relative to the update."""
    start = plain_model(model_path).state_dict()
    update = torch.cat([(one[name] - start[name]).flatten() for name in one])
    difference = torch.cat([(one[name] - other[name]).flatten() for name in one])
    assert update.norm() > 0
    return float(difference.norm() / update.norm())


def with_advantages(rollouts: list[ScoredRollout], advantage: float) -> list[ScoredRollout]:
    """The same rollouts, all with this advantage."""
    return [replace(scored, advantage=advantage) for scored in rollouts]


def served_state(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """CPU copies of the weights in Hugging Face names and rollout.dtype, without tied duplicates."""
    tensors = whole_tensors(learner._policy.model, getattr(torch, learner._rollout.dtype))
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}


def merged_by_peft(model_path: str, adapters: Path, dtype: str) -> dict[str, Tensor]:
    """The weights, as they are sent, of a model into which peft has merged the adapters in a folder."""
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), adapters)
    return dict(whole_tensors(adapted.merge_and_unload(), getattr(torch, dtype)))
