"""The ranks of a policy learner: how they find each other, and that a call goes to all of them. Actors are stand-ins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.actors.policy import Policy, start_policy
from cotrain.process.cluster import free_port


class Cluster:
    """Starts actors that answer with their role and the call."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.environments: dict[str, dict[str, str]] = {}
        self.node_of = {"policy": nodes[0]} | {f"policy_{rank}": node for rank, node in enumerate(nodes)}

    def node_address(self, node: str) -> str:
        return f"address of {node}"

    def start(self, actor_class: type, role: str, environment: dict[str, str]) -> "Actor":
        self.environments[role] = environment
        return Actor(role)

    def get(self, references: list[Any]) -> list[Any]:
        return references

    def put(self, argument: Any) -> Any:
        return argument


class Actor:
    """`actor.call.remote(method, ...)` and `actor.start.remote(...)`."""

    def __init__(self, role: str):
        self.role, self.calls = role, []
        self.call = self.start = self

    def remote(self, *arguments: Any) -> tuple[Any, float, float]:
        self.calls.append(arguments[0])
        return (self.role, *arguments), 0.0, 1.0


def started(run_config: Any, *nodes: str, **policy: Any) -> tuple[Cluster, Policy]:
    cluster = Cluster(nodes or ("a", "a"))
    config = run_config(policy={"model": "tiny:llama", **policy})
    agents = SimpleNamespace(model_path=Path("model"), call=lambda node, what, *_: 1234 if what is free_port else {})
    return cluster, start_policy(cluster, agents, config)  # type: ignore[arg-type]


def test_every_call_goes_to_all_ranks_and_returns_what_rank_0_does(run_config: Any) -> None:
    _, learner = started(run_config, num_processes=2)
    assert learner.write_payload("file") == ("policy_0", "write_payload", "file")
    assert [actor.calls[-1] for actor in learner._actors] == ["write_payload"] * 2


def test_two_processes_are_told_where_the_other_is(run_config: Any) -> None:
    cluster, _ = started(run_config, num_processes=2)
    first, second = (cluster.environments[f"policy_{rank}"] for rank in range(2))
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == second["MASTER_PORT"] == "1234"
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"], first["LOCAL_WORLD_SIZE"]) == ("0", "1", "2")


def test_ranks_count_anew_on_each_node_and_meet_at_the_first(run_config: Any) -> None:
    cluster, learner = started(run_config, "a", "a", "b", num_processes=3)
    found = [cluster.environments[f"policy_{rank}"] for rank in range(3)]
    assert [of_rank["LOCAL_RANK"] for of_rank in found] == ["0", "1", "0"]
    assert [of_rank["LOCAL_WORLD_SIZE"] for of_rank in found] == ["2", "2", "1"]
    assert {of_rank["MASTER_ADDR"] for of_rank in found} == {"address of a"} and learner.node == "a"


@pytest.mark.parametrize("sharding", [None, "fsdp2"])
def test_one_process_joins_a_group_only_to_be_sharded(run_config: Any, sharding: str | None) -> None:
    cluster, _ = started(run_config, sharding=sharding)
    assert list(cluster.environments) == ["policy"]
    assert cluster.environments["policy"].get("WORLD_SIZE") == ("1" if sharding else None)
