"""A Ray cluster of two nodes on this machine. They share the disk, but no address, working folder or shared memory."""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cotrain.process.cluster import RAY_ENVIRONMENT

FIRST, SECOND, THIRD = "e" * 56, "1" * 56, "7" * 56
"""Ids of the nodes. Ranks are numbered in the order of ids, so rank 0 is on the second node, the controller on the first."""
ROOT = Path(__file__).parents[2]
STORE_BYTES = 128 * 2**20
SECONDS = 60


class Holder:
    """An actor that does nothing."""


@dataclass
class TwoNodes:
    """The address of the first node, and the process behind the second one."""

    cluster: Any
    packages: Path
    """A folder in which the second node alone looks for packages."""
    second: "subprocess.Popen[bytes]"

    @property
    def address(self) -> str:
        return self.cluster.address

    def alive(self) -> set[str]:
        return {node["NodeID"] for node in self.cluster.global_state.node_table() if node["Alive"]}

    def wait_for(self, *nodes: str) -> None:
        deadline = time.monotonic() + SECONDS
        while self.alive() != set(nodes):
            assert self.second.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)

    def roles(self) -> list[tuple[str, str]]:
        """Class and node of each role that has been started."""
        actors = self.cluster.global_state.actor_table(None).values()
        found = sorted((actor["ActorClassName"], actor["Address"]["NodeID"]) for actor in actors)
        return [(name, node) for name, node in found if name.endswith("Actor")]


def cut_off(node: "subprocess.Popen[bytes]") -> None:
    """Kill all that runs on a node, as if its power had failed."""
    for process in [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait()


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """A fresh cluster. With cluster.strategy=SPREAD, Ray begins each round over the nodes with the second one."""
    os.environ.update(RAY_ENVIRONMENT)
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    head["env_vars"] = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FIRST}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    packages = tmp_path_factory.mktemp("packages")
    nodes = TwoNodes(cluster, packages, start_node(cluster.address, SECOND, "127.0.0.2", 4, packages))
    try:
        nodes.wait_for(FIRST, SECOND)
        hold_half_a_core(cluster.address)
        yield nodes
    finally:
        if nodes.second.poll() is None:
            cut_off(nodes.second)
        cluster.shutdown()


def start_node(address: str, node: str, own_address: str, num_cpus: int, packages: Path) -> "subprocess.Popen[bytes]":
    """Start a node in a mount namespace of its own, where that is allowed, with an empty /dev/shm."""
    own = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        warnings.warn("no namespace of its own for a node: all see one /dev/shm", stacklevel=2)
        own = []
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
    start += [
        f"--num-cpus={num_cpus}",
        f"--node-ip-address={own_address}",
        f"--object-store-memory={STORE_BYTES}",
        "--disable-usage-stats",
    ]
    environment = os.environ | {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node}
    environment["PYTHONPATH"] = f"{packages}:{ROOT}"
    return subprocess.Popen([*own, *start], env=environment, cwd="/", stdout=subprocess.DEVNULL)


def hold_half_a_core(address: str) -> None:
    """Of the first node, so that the second one has more that is free: otherwise Ray chooses by chance."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    where = NodeAffinitySchedulingStrategy(FIRST, soft=False)
    stays = {"name": "holder", "lifetime": "detached", "scheduling_strategy": where}
    holder = ray.remote(Holder).options(num_cpus=0.5, **stays).remote()
    ray.get(holder.__ray_ready__.remote())
    ray.shutdown()


@pytest.fixture(scope="module")
def address(two_nodes: TwoNodes) -> str:
    return two_nodes.address
