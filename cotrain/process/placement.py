"""Decides which node each role runs on. Either all roles get a place, or none does."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cotrain.config.schema import EnvironmentTask, RunConfig
from cotrain.process.failures import RunFailure

PLACEMENT_SECONDS = 60.0
"""Free resources are reserved at once. Nodes that a cluster starts on demand may take longer: the run is then started again."""


def roles_of(config: RunConfig) -> list[str]:
    """Return the names of the processes of a run."""
    roles = [f"rollout_{i}" for i in range(config.rollout.num_engines)]
    numbers = {
        "policy": config.policy.num_processes,
        "drafter": config.drafter is not None,
        "rewards": config.task.num_scorers,
        "environments": config.task.num_environments if isinstance(config.task, EnvironmentTask) else 0,
        "validation": config.validation is not None,
    }
    for role, number in numbers.items():
        roles += [role] if number == 1 else [f"{role}_{i}" for i in range(number)]
    return roles


def bundles_of(config: RunConfig, gpus: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the resources that each role of a run needs, in the order of roles_of. gpus: GPUs of each role that needs any."""
    return [{"CPU": 1} | ({"GPU": gpus[role]} if role in gpus else {}) for role in roles_of(config)]


def nodes_for(
    bundles: Sequence[Mapping[str, float]], free: Mapping[str, Mapping[str, float]], strategy: str
) -> list[str] | None:
    """Return the node of each bundle, or None if they do not fit.

    free: each node's resources. PACK takes the first node with room, most GPUs first; SPREAD the one with the fewest bundles.
    """
    left = {node: dict(free[node]) for node in sorted(free, key=lambda node: -free[node].get("GPU", 0.0))}
    chosen: list[str] = []
    for bundle in bundles:
        fitting = [n for n, has in left.items() if all(has.get(kind, 0.0) >= bundle[kind] - 1e-6 for kind in bundle)]
        if not fitting:
            return None
        numbers = Counter(chosen)
        chosen.append(fitting[0] if strategy == "PACK" else min(fitting, key=lambda node: numbers[node]))
        for kind, amount in bundle.items():
            left[chosen[-1]][kind] -= amount
    return chosen


def reserve(config: RunConfig, gpus: dict[str, float]) -> tuple[Any, dict[str, str]]:
    """Reserve a place for each role. Returns Ray's placement group, with a bundle for each role, and the node of each role.

    gpus: GPUs of each role; a role that is not named needs none. Raises RunFailure, with what each role needs and what each
    node has free, when the cluster cannot place all roles.
    """
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group, placement_group_table

    roles, strategy, bundles = roles_of(config), config.cluster.strategy, bundles_of(config, gpus)
    # Without labels, Ray may swap bundles of equal size between nodes. If they do not fit yet, it waits for more nodes.
    nodes = nodes_for(bundles, dict(sorted(available_resources_per_node().items())), strategy)
    labels = [{"ray.io/node-id": node} for node in nodes] if nodes else None
    group = placement_group(bundles, strategy=strategy, bundle_label_selector=labels)
    if not group.wait(PLACEMENT_SECONDS):
        needed = ", ".join(f"{role} {_in_words(bundle)}" for role, bundle in zip(roles, bundles, strict=True))
        ray.util.remove_placement_group(group)
        left, alive = available_resources_per_node(), [node for node in ray.nodes() if node["Alive"]]
        nothing = {"CPU": 0.0, "GPU": 0.0}
        free = (f"{n['NodeManagerAddress']} {_in_words(nothing | left.get(n['NodeID'], {}))}" for n in alive)
        raise RunFailure(
            f"the cluster cannot place all roles at once. Needed: {needed}. Free: {'; '.join(free)}. "
            "Add nodes, end what else runs there, or lower rollout.num_engines, policy.num_processes or task.num_scorers"
        )
    node_of = placement_group_table(group)["bundles_to_node_id"]
    return group, {role: node_of[index] for index, role in enumerate(roles)}


def _in_words(resources: dict[str, float]) -> str:
    return " and ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in resources)
