"""The nodes of a Ray cluster: do they run the same packages, and does a port of each answer to another?"""

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from cotrain.process.cluster import start_ray
from cotrain.run.provenance import differing_versions, package_versions
from pipelines.doctor.check import Problem

ANSWER_SECONDS = 60.0
"""In this time, a node only has to start a process, which imports nothing heavy."""
CONNECT_SECONDS = 5.0


class NodeAgent:
    """Runs on one node. Ray sends its code along, so that it also runs where cotrain is older."""

    def facts(self) -> dict[str, str]:
        """Return the versions of Python and of the installed packages."""
        return package_versions()

    def listen(self) -> tuple[str, int]:
        """Open a port on this node until the agent ends. Returns its address and number."""
        import ray

        address = ray.util.get_node_ip_address()
        self._listener = socket.create_server((address, 0))
        return address, self._listener.getsockname()[1]

    def connect(self, address: str, port: int, seconds: float) -> str | None:
        """Return why the port cannot be reached from this node, or None if it can."""
        try:
            socket.create_connection((address, port), seconds).close()
        except OSError as error:
            return str(error)
        return None


class Nodes:
    """An agent on each node of the cluster that Ray is connected to."""

    def __init__(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, agent, self._agents = ray, ray.remote(NodeAgent), dict[str, Any]()
        nodes = sorted((n["NodeManagerAddress"], n["NodeID"]) for n in ray.nodes() if n["Alive"])
        self.about = f"ray {ray.__version__}, {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        for number, (address, node) in enumerate(nodes):
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._agents[f"node {number} ({address})"] = agent.options(num_cpus=0, scheduling_strategy=there).remote()

    def nodes(self) -> str:
        """Python and packages are the same on all nodes."""
        facts = {name: self._answer(name, agent.facts.remote()) for name, agent in self._agents.items()}
        if problems := differing_versions(facts):
            raise Problem("; ".join(problems))
        (found, *_) = facts.values()
        return ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "ray", "cotrain")) + " on each"

    def ports(self) -> str:
        """Each node reaches a port that the next one has opened, in a ring; a single node reaches its own."""
        names, blocked = list(self._agents), []
        for name, other in zip(names, [*names[1:], names[0]], strict=True):
            address, port = self._answer(other, self._agents[other].listen.remote())
            connecting = self._agents[name].connect.remote(address, port, CONNECT_SECONDS)
            if error := self._answer(name, connecting):
                blocked.append(f"{name} does not reach port {port} of {other}: {error}")
        if blocked:
            raise Problem("; ".join(blocked))
        return f"{len(names)} nodes reach each other" if len(names) > 1 else "the node reaches a port of its own"

    def _answer(self, name: str, reference: Any) -> Any:
        """Return the agent's answer. Raises Problem naming the node when it does not answer."""
        from cotrain.process.deaths import in_words

        try:
            return self._ray.get(reference, timeout=ANSWER_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise Problem(f"{name} does not answer: {in_words(error)}") from error


@asynccontextmanager
async def ray_nodes(address: str | None) -> AsyncIterator[Nodes]:
    """The nodes of the cluster at this address, or of a private Ray that is started on this machine."""
    with ExitStack() as stack:
        ray = start_ray(address, stack)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield Nodes()
