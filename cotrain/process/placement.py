"""Which node each role runs on. All roles get their place, or none."""

from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.process.failures import RunFailure

PLACEMENT_SECONDS = 60.0
"""What a cluster has free shows at once; what it starts on demand takes longer, and the run is then started again."""


def roles_of(config: RunConfig) -> list[str]:
    """The names of the processes of a run."""
    ranks = config.policy.num_processes
    policy = ["policy"] if ranks == 1 else [f"policy_{rank}" for rank in range(ranks)]
    drafter = ["drafter"] if config.drafter is not None else []
    return [*(f"rollout_{i}" for i in range(config.rollout.num_engines)), *policy, *drafter, "rewards"]


class Placement:
    """The place of each role: a bundle of one Ray placement group, on one node."""

    def __init__(self, config: RunConfig, gpus: dict[str, float]):
        """gpus: GPUs of each role; a role that is not named needs none.

        Raises RunFailure with what was asked for and what each node has free, when the cluster cannot give it.
        """
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        roles = roles_of(config)
        bundles: list[dict[str, float]] = []
        for role in roles:
            bundles.append({"CPU": 1} | ({"GPU": gpus[role]} if gpus.get(role) else {}))
        self._group = placement_group(bundles, strategy=config.cluster.strategy)
        if not self._group.wait(PLACEMENT_SECONDS):
            asked = ", ".join(f"{role} {_in_words(bundle)}" for role, bundle in zip(roles, bundles, strict=True))
            ray.util.remove_placement_group(self._group)
            raise RunFailure(
                f"the cluster cannot place all roles at once. Asked for: {asked}. Free: {_free(ray)}. "
                "Add nodes, end what else runs there, or lower rollout.num_engines or policy.num_processes"
            )
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        places = {role: (index, node_of[index]) for index, role in enumerate(roles)}
        # Ray does not number bundles by node, and ranks of one node have to follow each other.
        ranks = [role for role in roles if role.startswith("policy")]
        in_order = sorted((places[role] for role in ranks), key=lambda place: (place[1], place[0]))
        self._places = places | dict(zip(ranks, in_order, strict=True))

    def node(self, role: str) -> str:
        """Id of the node of a role."""
        return self._places[role][1]

    def options(self, role: str) -> dict[str, Any]:
        """Options with which Ray starts the actor of a role in its place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if role not in self._places:
            return {}
        index, _ = self._places[role]
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def remove(self) -> None:
        """Give the places back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

    @property
    def nodes(self) -> set[str]:
        """Ids of all nodes that a role runs on."""
        return {node for _, node in self._places.values()}


def _in_words(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _free(ray: Any) -> str:
    from ray._private.state import available_resources_per_node

    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    free = available_resources_per_node()
    return "; ".join(
        f"{name} {_in_words({kind: free.get(node, {}).get(kind, 0.0) for kind in ('CPU', 'GPU')})}"
        for node, name in names.items()
    )
