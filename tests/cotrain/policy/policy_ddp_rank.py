"""What each of two learner processes does, and the single process they are compared with."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from policy_cases import make_learner, make_rollouts, served_state
from safetensors.torch import save_file

from cotrain.policy.learner import PolicyLearner
from cotrain.records import ScoredRollout
from drafters.base import SamplingParams

VARIANTS = {
    "token_mean": {"loss_aggregation": "token_mean", "minibatches": 2},
    "sequence": {
        "loss_aggregation": "seq_mean_token_mean",
        "importance_ratio": "sequence",
        "kl_coefficient": 0.1,
    },
    "token_sum": {"loss_aggregation": "seq_mean_token_sum", "old_log_probs": "recomputed"},
    "adapters": {"lora": {"rank": 4}, "kl_coefficient": 0.1, "minibatches": 2},
    "corrected": {"old_log_probs": "recomputed", "behaviour_correction": "truncate", "behaviour_cap": 1.1},
}


def one_advantage(model_path: str) -> list[ScoredRollout]:
    rollouts = [replace(scored, advantage=0.0) for scored in make_rollouts(model_path)]
    return [replace(rollouts[0], advantage=1.0), *rollouts[1:]]


def train(learner: PolicyLearner, model_path: str) -> list[dict[str, float]]:
    """Odd numbers of rollouts, so that the shares differ; then a step in which one rank alone has an advantage."""
    metrics = [learner.update(make_rollouts(model_path, seed)[: 11 - seed]) for seed in range(2)]
    return [*metrics, learner.update(one_advantage(model_path))]


def leave(learner: PolicyLearner) -> None:
    """Leave the process group, once all ranks are done with it."""
    learner._accelerator.wait_for_everyone()
    learner._accelerator.end_training()


def run_rank(rank: int, port: int, model_path: str, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    output = Path(folder)
    for name, policy in VARIANTS.items():
        learner = make_learner(model_path, micro_batch_tokens=60, num_processes=2, **policy)
        metrics = train(learner, model_path)
        save_file(served_state(learner), output / f"{name}-{rank}.safetensors")
        (output / f"{name}-{rank}.json").write_text(json.dumps(metrics))

    learner.save(output / "saved")
    rollouts = make_rollouts(model_path)
    returned = [
        learner.write_payload(output / "policy.safetensors"),
        learner.hidden_states([1, 2, 3], (0, 1)),
        learner.response_draws([rollouts[0].rollout], SamplingParams(1.0, 1.0, 0, "greedy"), 0.0),
    ]
    (output / f"returns-{rank}.json").write_text(json.dumps([result is not None for result in returned]))
    (output / f"on-{rank}.json").write_text(json.dumps([learner.update(make_rollouts(model_path, seed=4))]))

    rollouts[5] = replace(rollouts[5], advantage=math.nan)
    try:
        learner.update(rollouts)
    except FloatingPointError as error:
        (output / f"error-{rank}").write_text(str(error))
    leave(learner)
    os._exit(0)  # gloo's threads now and then keep a process from ending; the ranks of a run are killed by Ray
