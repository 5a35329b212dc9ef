"""A real Ray, in a process of its own: who may connect to a private cluster, and which clusters a run may join."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

PRIVATE = """
import json, os, signal, subprocess, sys
from pathlib import Path
from cotrain.process.cluster import Cluster
from cotrain.config.schema import RunConfig

CLIENT = '''
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    print("connected", ray.cluster_resources()["CPU"])
except (ConnectionError, ray.exceptions.AuthenticationError) as error:
    print("refused", error)
'''

class Greeter:
    def __init__(self, log_file): pass
    def greet(self): return "hello"

signal.signal(signal.SIGTERM, signal.SIG_IGN)
task = {"type": "reasoning_gym", "name": "chain_sum"}
config = RunConfig(name="private", steps=1, policy={"model": "tiny:llama"}, task=task, cluster={"device": "cpu"})
cluster = Cluster(config, Path.cwd())
import ray
actor = cluster.start(Greeter, "greeter", environment={"GREETING": "1"})
found = {"actor": cluster.get([actor.greet.remote()])[0]}
found["handler is ours"] = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
token = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
clients = {"none": {}, "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}, "right": token}
address = ray.get_runtime_context().gcs_address
for name, environment in clients.items():
    done = subprocess.run([sys.executable, "-c", CLIENT, address], env=without | environment | {"RAY_NUM_REDIS_GET_RETRIES": "1"},
                          capture_output=True, text=True, timeout=60)
    found[name] = done.stdout or done.stderr
cluster.stop()
print(json.dumps(found))
"""


def run(script: str, folder: Path) -> dict[str, Any]:
    (folder / "script.py").write_text(script)
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=own, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Token authentication" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_client_without_the_token_is_refused_by_a_private_cluster(tmp_path: Path) -> None:
    found = run(PRIVATE, tmp_path)
    assert found["actor"] == "hello"
    assert found["handler is ours"]  # SIGTERM still means: finish the step and save
    assert found["right"] == "connected 64.0\n"
    assert found["none"].startswith("refused") and found["wrong"].startswith("refused"), found
    assert not (tmp_path / ".ray").exists()  # the token is the run's own


TOO_MANY = """
import json
from pathlib import Path
from cotrain.process import placement
from cotrain.process.cluster import Cluster
from cotrain.process.failures import RunFailure
from cotrain.config.schema import RunConfig

placement.PLACEMENT_SECONDS = 1.0
task = {"type": "reasoning_gym", "name": "chain_sum"}
policy = {"model": "tiny:llama"}
found = {}
for name, rollout, cluster in (("many", {"num_engines": 70}, {}), ("nobody", {}, {"address": "127.0.0.1:1"})):
    config = RunConfig(name=name, steps=1, policy=policy, task=task, rollout=rollout, cluster={"device": "cpu"} | cluster)
    try:
        Cluster(config, Path.cwd())
    except RunFailure as failure:
        found[name] = str(failure)
    import ray
    ray.shutdown()
print(json.dumps(found))
"""


def test_a_cluster_that_is_not_there_or_too_small_says_what_was_asked_and_what_is_free(tmp_path: Path) -> None:
    found = run(TOO_MANY, tmp_path)
    assert found["many"].startswith("the cluster cannot place all roles at once. Asked for: rollout_0 1 CPU, ")
    assert re.search(r"policy 1 CPU, rewards 1 CPU\. Free: \S+ 64 CPU and 0 GPU\. Add nodes", found["many"])
    assert found["nobody"].startswith("cluster.address: no Ray cluster answers at 127.0.0.1:1 (")


OUTSTANDING = """
import asyncio, json, time
from pathlib import Path
from cotrain.process.cluster import Cluster
from cotrain.config.schema import RunConfig
from cotrain.roles.engines import EngineActor, RolloutEngines
from cotrain.transport.nodes import Nodes

class Slow:
    async def generate(self, requests, tap):
        await asyncio.sleep(5)
    async def update_policy(self, payload, version, keep_kv):
        return "updated"

class SlowEngine(EngineActor):
    _engine = Slow()  # calls of an asynchronous actor may overtake each other
    def load_library(self): pass

import cotrain.roles.engines
cotrain.roles.engines.EngineActor = SlowEngine
task = {"type": "reasoning_gym", "name": "chain_sum"}
config = RunConfig(name="slow", steps=1, policy={"model": "tiny:llama"}, task=task, cluster={"device": "cpu"})
cluster = Cluster(config, Path.cwd())
nodes = Nodes(cluster, "slow")
engines = RolloutEngines(cluster, nodes, config)
engines._update = lambda method, payload, *args: engines._ask({0: (method, payload, *args)})
engines.call("update_policy", None, 0, False)
outstanding = [engines.begin_generate(0, [], False) for _ in range(12)]
started = time.monotonic()
engines.call("update_policy", None, 1, False)
print(json.dumps({"seconds": time.monotonic() - started, "under way": 12 - len(cluster.wait_any(outstanding, 0.0))}))
nodes.close()
cluster.stop()
"""


def test_a_control_call_does_not_wait_behind_rollouts(tmp_path: Path) -> None:
    found = run(OUTSTANDING, tmp_path)
    assert found["under way"] == 12 and found["seconds"] < 0.5
