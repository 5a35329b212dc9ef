"""Facts and ports of nodes: made-up facts, ports that are really closed or full, and agents on a real Ray."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotrain.run.provenance import differing_versions
from pipelines.doctor.nodes import NodeAgent

ROOT = Path(__file__).parents[3]


def test_another_version_on_one_node_is_named_and_equal_ones_are_not() -> None:
    facts = {"node 0": {"python": "3.11.7", "torch": "2.13.0", "vllm": "0.32.0"}}
    assert differing_versions(facts | {"node 1": facts["node 0"]}) == []
    other = facts["node 0"] | {"torch": "2.12.1"}
    del other["vllm"]
    assert differing_versions(facts | {"node 1": other}) == [
        "torch is 2.13.0 on node 0, 2.12.1 on node 1",
        "vllm is 0.32.0 on node 0, missing on node 1",
    ]


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port whose queue is full, so that the kernel drops what asks to connect, as a firewall would."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        yield port
        for client in waiting:
            client.close()


def test_a_blocked_port_is_not_reached(full_port: int) -> None:
    agent = NodeAgent()
    assert agent.connect("127.0.0.1", full_port, 0.3) == "timed out"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert agent.connect("127.0.0.1", port, 0.3) is None
    assert "refused" in str(agent.connect("127.0.0.1", port, 0.3))


SCRIPT = """
import asyncio, json, socket, sys
from pipelines.doctor.check import run_check
from pipelines.doctor.nodes import NodeAgent, ray_nodes

class Deaf(NodeAgent):
    def listen(self):
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        return self._listener.getsockname()

async def main():
    found = {}
    async with ray_nodes(None) as nodes:
        import ray

        async def check(planted):
            made = [await run_check(name, getattr(nodes, name), "mend it") for name in ("nodes", "ports")]
            found[planted] = {check.name: [check.status, check.found] for check in made}

        await check("nothing")
        other = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": sys.argv[1]}}}
        nodes._agents["node 1"] = ray.remote(NodeAgent).options(**other).remote()
        await check("other package on one node")
        nodes._agents["node 1"] = ray.remote(Deaf).options(num_cpus=0).remote()
        await check("port blocked")
        ray.kill(nodes._agents["node 1"])
        await check("node gone")
    print(json.dumps(found))

asyncio.run(main())
"""


def test_agents_on_a_real_ray(tmp_path: Path) -> None:
    """The second agent has an environment of its own, with another cotrain."""
    package = tmp_path / "packages" / "cotrain-9.9.9.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cotrain\nVersion: 9.9.9\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py", str(package.parent)]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in found["nothing"].values()] == ["pass", "pass"]
    assert found["other package on one node"]["ports"] == ["pass", "2 nodes reach each other"]
    status, text = found["other package on one node"]["nodes"]
    assert status == "fail" and text.startswith("cotrain is ") and "9.9.9 on node 1" in text
    assert found["port blocked"]["nodes"][0] == "pass"
    status, text = found["port blocked"]["ports"]
    assert status == "fail" and re.match(r"node 0 \(.*\) does not reach port \d+ of node 1: .* refused", text)
    assert all(status == "fail" and "node 1 does not answer" in text for status, text in found["node gone"].values())
