"""The ranks of a policy learner: how they find each other, and that a call goes to all of them. Actors are stand-ins."""

from pathlib import Path
from typing import Any

import pytest

from cotrain.roles.learners import Learner, start_policy


class Cluster:
    """Starts actors that answer with their role and the call."""

    device = "cpu"

    def __init__(self) -> None:
        self.environments: dict[str, dict[str, str]] = {}

    def start(self, actor_class: type, role: str, environment: dict[str, str]) -> "Actor":
        self.environments[role] = environment
        return Actor(role)

    def get(self, references: list[Any]) -> list[Any]:
        return references


class Actor:
    """`actor.call.remote(method, ...)` and `actor.start.remote(...)`."""

    def __init__(self, role: str):
        self.role, self.calls = role, []
        self.call = self.start = self

    def remote(self, *arguments: Any) -> tuple[Any, float, float]:
        self.calls.append(arguments[0])
        return (self.role, *arguments), 0.0, 1.0


def started(run_config: Any, **policy: Any) -> tuple[Cluster, Learner]:
    cluster = Cluster()
    config = run_config(policy={"model": "tiny:llama", **policy})
    return cluster, start_policy(cluster, config, Path("model"))  # type: ignore[arg-type]


def test_every_call_goes_to_all_ranks_and_returns_what_rank_0_does(run_config: Any) -> None:
    _, learner = started(run_config, num_processes=2)
    assert learner.call("write_payload", "file") == ("policy_0", "write_payload", "file")
    assert [actor.calls[-1] for actor in learner._actors] == ["write_payload"] * 2


def test_two_processes_are_told_where_the_other_is(run_config: Any) -> None:
    cluster, _ = started(run_config, num_processes=2)
    first, second = (cluster.environments[f"policy_{rank}"] for rank in range(2))
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.parametrize("sharding", [None, "fsdp2"])
def test_one_process_joins_a_group_only_to_be_sharded(run_config: Any, sharding: str | None) -> None:
    cluster, _ = started(run_config, sharding=sharding)
    assert list(cluster.environments) == ["policy"]
    assert cluster.environments["policy"].get("WORLD_SIZE") == ("1" if sharding else None)
