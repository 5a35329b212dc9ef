"""What each of two learner processes does under FSDP2, alone and together, and what they are compared with."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from policy_cases import ROLLOUT, make_learner, make_rollouts, served_state
from policy_ddp_rank import leave, train
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.core_model_loading import revert_weight_conversion

from cotrain.policy.learner import PolicyLearner
from drafters.base import SamplingParams

MICRO_BATCH_TOKENS = 24
"""So few that the ranks' numbers of micro-batches differ."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("tiny_model", {"minibatches": 2, "kl_coefficient": 0.1}),
    "untied": ("untied_model", {"importance_ratio": "sequence"}),
    "recomputed": ("tiny_model", {"old_log_probs": "recomputed", "behaviour_correction": "mask", "minibatches": 2}),
    "checkpointed": ("untied_model", {"gradient_checkpointing": True}),
    "experts": ("experts_model", {}),
    "adapters": ("tiny_model", {"lora": {"rank": 4}, "kl_coefficient": 0.1, "minibatches": 2}),
    "bfloat16": ("tiny_model", {"gradient_checkpointing": True, "dtype": "bfloat16"}),
}
"""By name: the model and the fields of PolicyConfig."""

BFLOAT16 = ROLLOUT.model_copy(update={"dtype": "bfloat16"})
SAMPLING = SamplingParams(ROLLOUT.temperature, 1.0, 0, "greedy")
TOKENS = [5, 9, 100, 3, 77]

Outcome = tuple[list[dict[str, float]], dict[str, Tensor]]
"""The metrics of updates, and what was computed besides."""


def use(learner: PolicyLearner, model: str) -> Outcome:
    """Call every method that computes. Updates come before and after passes that only look at the policy."""
    hidden = learner.hidden_states(TOKENS, (0, 1, 2))
    metrics = train(learner, model)
    draws = learner.response_draws([scored.rollout for scored in make_rollouts(model)[:3]], SAMPLING, 0.0)
    metrics.append(learner.update(make_rollouts(model, seed=3)))
    assert hidden is not None and draws is not None
    log_probs = torch.cat([torch.from_numpy(of_rollout.log_prob) for of_rollout in draws])
    return metrics, {"aux": hidden[0], "final": hidden[1], "log_probs": log_probs} | served_state(learner)


def go_on(learner: PolicyLearner, model: str) -> Outcome:
    """What a learner does after it has saved, or was loaded."""
    return [learner.update(make_rollouts(model, seed)) for seed in (4, 5)], served_state(learner)


def write(outcome: Outcome, file: Path) -> None:
    file.with_suffix(".json").write_text(json.dumps(outcome[0]))
    save_file(outcome[1], file.with_suffix(".safetensors"))


def join(rank: int, world: int, port: int) -> None:
    """Make this process a rank of the learners that come, whatever it was before."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    AcceleratorState._reset_state(reset_partial_state=True)


def run_rank(rank: int, ports: list[int], models: dict[str, str], folder: str) -> None:
    torch.set_num_threads(1)
    output, tiny = Path(folder), models["tiny_model"]
    if rank == 0:
        join(0, 1, ports[0])
        alone = make_learner(tiny, sharding="fsdp2")
        write(use(alone, tiny), output / "alone")
        alone.save(output / "saved_by_1")
        write(go_on(alone, tiny), output / "alone_on")
        leave(alone)

    join(rank, 2, ports[1])
    fields = {"sharding": "fsdp2", "num_processes": 2, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    for name, (model, policy) in VARIANTS.items():
        learner = make_learner(models[model], BFLOAT16, **fields, **policy)
        write(use(learner, models[model]), output / f"{name}-{rank}")
        stream(learner, output / name)
    resume(tiny, fields, rank, output)
    fail(tiny, fields, rank, output)
    (output / f"peak-{rank}").write_text(str(peak_of_streaming(models["large_model"], fields, output)))
    leave(learner)

    if rank == 0:
        join(0, 1, ports[2])
        alone = make_learner(tiny, sharding="fsdp2")
        alone.load(output / "saved_by_2")
        write(go_on(alone, tiny), output / "from_2_to_1")
        leave(alone)
    os._exit(0)  # gloo's threads now and then keep a process from ending; the ranks of a run are killed by Ray


def stream(learner: PolicyLearner, file: Path) -> None:
    """Write the payload, and beside it the whole state as torch gathers it."""
    payload = learner.write_payload(file.with_suffix(".payload"))
    model = learner._policy.model
    if learner._sent is not None:
        learner.save(file.with_suffix(".saved"))
        return
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if payload is not None:
        state = {name: whole[name].bfloat16() for name in whole if name not in model.all_tied_weights_keys}
        save_file(revert_weight_conversion(model, state), file.with_suffix(".whole"), metadata={"format": "pt"})
        file.with_suffix(".digests").write_text(json.dumps(payload.digests))


def resume(model: str, fields: dict[str, Any], rank: int, output: Path) -> None:
    """Save and go on; do the same from what was saved, and from what other numbers of ranks have saved."""
    learner = make_learner(model, **fields)
    write(use(learner, model), output / f"two-{rank}")
    learner.hidden_states(TOKENS, (0,))  # FSDP leaves head and embedding whole, of which parts are saved none the less
    learner.save(output / "saved_by_2")
    write(go_on(learner, model), output / f"two_on-{rank}")
    for saved, resumed in (("saved_by_2", "from_2_to_2"), ("saved_by_1", "from_1_to_2"), ("saved_whole", "from_whole")):
        learner = make_learner(model, **fields)
        learner.update(make_rollouts(model, seed=9))  # the state that is loaded replaces another
        learner.load(output / saved)
        write(go_on(learner, model), output / f"{resumed}-{rank}")


def fail(model: str, fields: dict[str, Any], rank: int, output: Path) -> None:
    """Rank 0 cannot write, and a rollout of one rank is broken. Neither rank may wait for the other."""
    learner = make_learner(model, **fields)
    rollouts = make_rollouts(model)
    try:
        learner.write_payload(output / "no such folder" / "policy.safetensors")
    except OSError as error:
        (output / f"disk-{rank}").write_text(str(error))
    learner.update(rollouts)
    rollouts[5] = replace(rollouts[5], advantage=math.nan)
    try:
        learner.update(rollouts)
    except FloatingPointError as error:
        (output / f"error-{rank}").write_text(str(error))


def peak_of_streaming(model: str, fields: dict[str, Any], output: Path) -> int:
    """Most bytes that this rank took to write a payload."""
    learner = make_learner(model, BFLOAT16, **fields)
    learner.write_payload(output / "small.payload")  # what libraries allocate when they are first used
    Path("/proc/self/clear_refs").write_text("5")  # makes the peak the present size
    before = resident_bytes("VmRSS")
    learner.write_payload(output / "large.payload")
    return resident_bytes("VmHWM") - before


def resident_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
