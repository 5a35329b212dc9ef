"""A real Ray, in a process of its own: who may connect to a private cluster, and which clusters a run may join."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
task = {"type": "dataset", "path": "is read by nobody here", "reward": "my_reward:score"}
config = RunConfig(name="private", steps=1, policy={"model": "tiny:llama"}, task=task)
cluster = Cluster(config, Path.cwd())
import ray
import psutil
actor = cluster.start(Greeter, "rewards", environment={"GREETING": "1"})
found = {"actor": cluster.get([actor.greet.remote()])[0]}
found["handler is ours"] = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
token = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
clients = {"none": {}, "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}, "right": token}
address = ray.get_runtime_context().gcs_address
processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
sockets = [socket for process in processes for socket in process.net_connections("inet") if socket.status == "LISTEN"]
found["listening at"] = sorted({socket.laddr.ip.removeprefix("::ffff:") for socket in sockets})
found["listeners"] = len(sockets)
for name, environment in clients.items():
    done = subprocess.run([sys.executable, "-c", CLIENT, address], env=without | environment | {"RAY_NUM_REDIS_GET_RETRIES": "1"},
                          capture_output=True, text=True, timeout=60)
    found[name] = done.stdout or done.stderr

from types import SimpleNamespace
from cotrain.records import Prompt
from cotrain.actors.rewards import Rewards
reward, prompt = Path("my_reward.py"), Prompt("p", [{"role": "user", "content": "3 + 4?"}], 7)
reward.write_text("def score(prompt, response, answer):\\n    return 1 / (len(response) - answer)\\n")
rewards = Rewards(cluster, SimpleNamespace(call=lambda node, function, *args: function(*args)), config, "rewards")
cluster.get([rewards.starting])
paid, failed = cluster.get([rewards.begin(prompt, ["a" * 8, "a" * 9]), rewards.begin(prompt, ["a" * 7])])
found |= {"paid": paid, "failed": [type(failed).__name__, str(failed)]}
reward.write_text("broken =\\n")
try:
    cluster.get([rewards.restart()])
except ValueError as error:
    found["restart"] = str(error)
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
    assert "Token authentication" not in done.stderr and "(raylet)" not in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What PRIVATE has found, and the folder in which it ran."""
    folder = tmp_path_factory.mktemp("private")
    return run(PRIVATE, folder), folder


def test_a_private_cluster_listens_on_loopback_alone_and_refuses_a_client_without_the_token(
    private: tuple[dict[str, Any], Path],
) -> None:
    found, folder = private
    assert found["listening at"] == ["127.0.0.1"] and found["listeners"] >= 6
    assert found["actor"] == "hello"
    assert found["handler is ours"]  # SIGTERM still means: finish the step and save
    assert found["right"] == "connected 64.0\n"
    assert found["none"].startswith("refused") and found["wrong"].startswith("refused"), found
    assert not (folder / ".ray").exists()  # the token is the run's own


def test_the_scoring_process_returns_what_a_reward_raises_and_its_restart_raises_its_own_error(
    private: tuple[dict[str, Any], Path],
) -> None:
    found, folder = private
    assert found["paid"] == [1.0, 0.5]
    kind, failure = found["failed"]
    assert kind == "TaskFailed" and failure.startswith("task.reward raised ZeroDivisionError: division by zero\n")
    assert f'File "{folder}/my_reward.py", line 2, in score' in failure and "response: 'aaaaaaa'" in failure
    assert "ZeroDivisionError" in (folder / "rewards.log").read_text()
    assert found["restart"].startswith("task.reward: my_reward:score is neither") and "SyntaxError" in found["restart"]


SCORERS = """
import json, time
from pathlib import Path
from types import SimpleNamespace
from cotrain.actors.rewards import start_scorers
from cotrain.config.schema import RunConfig
from cotrain.loop.ledger import Group
from cotrain.loop.reactor import Reactor
from cotrain.loop.scoring import Scoring
from cotrain.process.cluster import Cluster
from cotrain.records import Prompt

REWARD = '''
import os, time
def score(prompt, response, answer):
    if response == "kills once" and not os.path.exists("killed"):
        open("killed", "w").close()
        os._exit(1)
    time.sleep(answer)
    print(response, os.getpid(), file=open("scored", "a"))
    return float(len(response))
'''
Path("my_reward.py").write_text(REWARD)
task = {"type": "dataset", "path": "is read by nobody here", "reward": "my_reward:score", "num_scorers": 2}
config = RunConfig(name="scorers", steps=1, policy={"model": "tiny:llama"}, task=task)
cluster = Cluster(config, Path.cwd())
reactor = Reactor(cluster, 60.0)
scorers = start_scorers(cluster, SimpleNamespace(call=lambda node, function, *args: function(*args)), config)
cluster.get([one.starting for one in scorers])
paid, lost, first = {}, [], [one._actor for one in scorers]
scoring = Scoring(scorers, reactor, 30.0, lambda group, rewards: paid.update({group.number: rewards}),
                  lambda group, reason: lost.append((group.number, reason)))

def score(number, seconds, response):
    scoring.add(Group(number, prompt=Prompt(f"{number}", [], seconds), rollouts=[SimpleNamespace(text=response)]))

reactor.until(lambda: all(one.ready for one in scoring._scorers))
began = time.monotonic()
for number in range(6):
    score(number, 0.5, "x" * number)
reactor.until(lambda: len(paid) == 6)
found = {"seconds": time.monotonic() - began, "paid": paid}
for number in range(6, 12):
    score(number, 0.01, "kills once" if number == 6 else "y" * number)
reactor.until(lambda: len(paid) + len(lost) == 12)
score(6, 0.01, "kills once")
reactor.until(lambda: len(paid) == 12 and all(one.ready for one in scoring._scorers))
found |= {"paid later": paid, "lost": lost, "same process": [one._actor is actor for one, actor in zip(scorers, first)]}
found["processes"] = len({line.split()[-1] for line in Path("scored").read_text().splitlines()})
cluster.stop()
print(json.dumps(found))
"""


def test_several_scorers_work_side_by_side_and_one_that_dies_is_replaced_alone(tmp_path: Path) -> None:
    found = run(SCORERS, tmp_path)
    assert found["paid later"] == {str(i): [10.0 if i == 6 else float(i)] for i in range(12)}
    assert found["seconds"] < 6 * 0.5  # what one scorer sleeps
    assert found["lost"] == [[6, "the scorer died"]]
    assert sorted(found["same process"]) == [False, True] and found["processes"] >= 2
    assert {path.name for path in tmp_path.glob("rewards*.log")} == {"rewards_0.log", "rewards_1.log"}


TOO_MANY = """
import json
from pathlib import Path
from cotrain.process import cluster
from cotrain.process.cluster import Cluster
from cotrain.process.failures import RunFailure
from cotrain.config.schema import RunConfig

cluster.PLACEMENT_SECONDS = 1.0
task = {"type": "reasoning_gym", "name": "chain_sum"}
policy = {"model": "tiny:llama"}
found = {}
for name, rollout, cluster in (("many", {"num_engines": 70}, {}), ("nobody", {}, {"address": "127.0.0.1:1"})):
    config = RunConfig(name=name, steps=1, policy=policy, task=task, rollout=rollout, cluster=cluster)
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
    assert found["many"].startswith("the cluster cannot place all roles at once. Needed: rollout_0 1 CPU, ")
    assert re.search(r"policy 1 CPU, rewards 1 CPU\. Free: \S+ 64 CPU and 0 GPU\. Add nodes", found["many"])
    assert found["nobody"].startswith("cluster.address: no Ray cluster answers at 127.0.0.1:1 (")


FOUR_NODES = """
import json, os, time
from cotrain.process.cluster import RAY_ENVIRONMENT, place
os.environ.update(RAY_ENVIRONMENT)
import ray
from ray.cluster_utils import Cluster
from cotrain.config.load import load_config
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from cotrain.process.cluster import bundles_of, nodes_for, reserve, roles_of

cluster = Cluster()
for _ in range(4):  # Ray counts what it is told, also GPUs that are not there
    cluster.add_node(num_cpus=40, num_gpus=8, object_store_memory=100 * 2**20, include_dashboard=False)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
free = {f"node {i}": {"CPU": 40.0, "GPU": 8.0} for i in range(4)}

class Where:
    def gpus(self):
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

found = {}
for strategy in ("PACK", "SPREAD"):
    sizes = ["rollout.num_engines=16", "policy.num_processes=16", "rollout.prompts_per_step=8"]
    config = load_config([CONFIG], [*sizes, f"cluster.strategy={strategy}"])
    gpus = place(config, [8] * 4)
    while ray.available_resources().get("GPU") != 32:
        time.sleep(0.1)
    group, node_of = reserve(config, gpus)
    planned = dict(zip(roles_of(config), nodes_for(bundles_of(config, gpus), free, strategy)))
    name = dict(zip(sorted(set(node_of.values())), free))
    own = [PlacementGroupSchedulingStrategy(group, [*node_of].index(role)) for role in ("policy_15", "drafter")]
    actors = [ray.remote(Where).options(num_cpus=0, num_gpus=0.5, scheduling_strategy=place).remote() for place in own]
    shared = ray.get([actor.gpus.remote() for actor in actors])
    found[strategy] = planned == {role: name[node] for role, node in node_of.items()}
    if strategy == "PACK":
        found["shared"] = shared[0] == shared[1]
    del actors
    ray.util.remove_placement_group(group)
ray.shutdown()
cluster.shutdown()
print(json.dumps(found))
"""


@pytest.mark.engine
@pytest.mark.long
def test_roles_run_where_the_plan_puts_them(tmp_path: Path) -> None:
    """33 processes on 32 GPUs of four nodes of a real Ray: the last learner and the drafter trainer share one."""
    smoke = Path(__file__).parents[3] / "configs" / "smoke.toml"
    assert run(FOUR_NODES.replace("CONFIG", repr(str(smoke)), 1), tmp_path) == {
        "PACK": True,
        "shared": True,
        "SPREAD": True,
    }


OUTSTANDING = """
import asyncio, json, time
from pathlib import Path
from cotrain.process.cluster import Cluster
from cotrain.config.schema import RunConfig
from cotrain.actors.engines import RolloutEngines
from cotrain.actors.replicas import EngineActor
from cotrain.transport.nodes import Nodes
from cotrain.records import Versions
from cotrain.weights.versions import CurrentWeights

class Slow:
    async def generate(self, requests, tap, together):
        await asyncio.sleep(5)
    async def reset_prefix_cache(self):
        pass

class SlowEngine(EngineActor):
    _engine = Slow()  # calls of an asynchronous actor may overtake each other
    def load_library(self): pass

import cotrain.actors.replicas
cotrain.actors.replicas.EngineActor = SlowEngine
task = {"type": "reasoning_gym", "name": "chain_sum"}
config = RunConfig(name="slow", steps=1, policy={"model": "tiny:llama"}, task=task)
cluster = Cluster(config, Path.cwd())
nodes = Nodes(cluster, "slow")
engines = RolloutEngines(cluster, nodes, config, CurrentWeights(Versions(0, 0)), print)
engines.call_all(Slow.reset_prefix_cache)
outstanding = [engines.begin_generate(0, [], False) for _ in range(12)]
started = time.monotonic()
engines.call_all(Slow.reset_prefix_cache)
print(json.dumps({"seconds": time.monotonic() - started, "under way": 12 - sum(map(cluster.is_there, outstanding))}))
nodes.close()
cluster.stop()
"""


def test_a_control_call_does_not_wait_behind_rollouts(tmp_path: Path) -> None:
    found = run(OUTSTANDING, tmp_path)
    assert found["under way"] == 12 and found["seconds"] < 0.5


RANKS = """
import json, threading
from pathlib import Path
import cotrain.process.cluster
from cotrain.process.cluster import Cluster
from cotrain.actors.policy import Policy
from cotrain.config.schema import RunConfig
from cotrain.loop.reactor import Reactor

class Rollouts:
    pickled = 0
    def __reduce__(self):
        Rollouts.pickled += 1
        return bytes, (b"x" * 100 * 2**20,)

class Learner:
    def update(self, rollouts):
        return len(rollouts[0])

cotrain.process.cluster.OBJECT_STORE_BYTES = 80 * 2**20  # less than the rollouts need
task = {"type": "reasoning_gym", "name": "chain_sum"}
config = RunConfig(name="ranks", steps=1, policy={"model": "tiny:llama", "num_processes": 3}, task=task,
                   rollout={"prompts_per_step": 3, "num_engines": 1})
cluster = Cluster(config, Path.cwd())
from cotrain.actors.learner import LearnerActor
actors = [cluster.start(LearnerActor, f"policy_{rank}", {}) for rank in range(3)]
policy, reactor = Policy(cluster, actors, "", Learner), Reactor(cluster, 60.0)
update, arrived = policy.begin_update([Rollouts()]), []
for call in update:
    reactor.add(call.reference, lambda answer: arrived.append(answer[0]))
reactor.until(lambda: len(arrived) == 3)
print(json.dumps({"pickled": Rollouts.pickled, "arrived": arrived, "rank 0": policy.finish(update)}))
cluster.stop()
"""


def test_rollouts_go_into_the_object_store_once_for_all_ranks_even_if_it_is_too_small(tmp_path: Path) -> None:
    found = run(RANKS, tmp_path)
    assert found == {"pickled": 1, "arrived": [100 * 2**20] * 3, "rank 0": 100 * 2**20}


FILES = """
import json, os
from pathlib import Path
from cotrain.process.cluster import RAY_ENVIRONMENT, Cluster
os.environ |= RAY_ENVIRONMENT
from ray.cluster_utils import Cluster as RayNodes
from cotrain.config.schema import RunConfig
from cotrain.process.failures import RunFailure
from cotrain.transport.nodes import PART_BYTES, Nodes

ray_nodes, size = RayNodes(), {"num_cpus": 4, "object_store_memory": 300 * 2**20}
ray_nodes.add_node(**size, include_dashboard=False)
ray_nodes.add_node(**size)
task = {"type": "reasoning_gym", "name": "chain_sum"}
config = RunConfig(name="files", steps=1, policy={"model": "tiny:llama"}, task=task,
                   cluster={"address": ray_nodes.address, "strategy": "SPREAD"})
cluster = Cluster(config, Path.cwd())
nodes = Nodes(cluster, "files")
[other] = nodes.scratch.keys() - {nodes.local}
sizes = [2 * PART_BYTES + 1, 10, 0, PART_BYTES]
there = []
for i, number in enumerate(sizes):
    path = nodes.scratch[nodes.local] / f"{i}"
    path.write_bytes(os.urandom(1000) * (number // 1000) + b"x" * (number % 1000))
    there.append(nodes.begin_bring(str(path), other))
back = [nodes.begin_bring(nodes.arrived(coming), nodes.local, move=True) for coming in there]
paths = [Path(nodes.arrived(coming)) for coming in back]
local = [nodes.scratch[nodes.local] / f"{i}" for i in range(len(sizes))]
found = {"same": [a.read_bytes() == b.read_bytes() for a, b in zip(paths, local)]}
found["moved"] = [nodes.call(other, Path.exists, Path(coming.path)) for coming in there]
found["at home"] = nodes.bring(str(local[0]), nodes.local) == str(local[0])
nodes.bring(str(local[1]), other)
nodes.remove_all([there[1].path, str(local[1])])
found["removed"] = nodes.call(other, Path.exists, Path(there[1].path)) or local[1].exists()
cluster.kill(nodes._agents[other])
try:
    nodes.bring(there[0].path, nodes.local)
except RunFailure as failure:
    found["gone"] = str(failure)
nodes.close()
cluster.stop()
ray_nodes.shutdown()
print(json.dumps(found))
"""


def test_files_go_from_node_to_node_side_by_side_and_whole(tmp_path: Path) -> None:
    found = run(FILES, tmp_path)
    assert found["same"] == [True] * 4 and found["moved"] == [False] * 4
    assert found["at home"] and not found["removed"]
    assert "its process has died" in found["gone"]


DEATHS = """
import json, os, time
from pathlib import Path
from cotrain.process.cluster import RAY_ENVIRONMENT, Cluster
quick = {"initial_delay_ms": 300, "period_ms": 300, "timeout_ms": 300, "failure_threshold": 2}
os.environ |= RAY_ENVIRONMENT | {f"RAY_health_check_{name}": str(value) for name, value in quick.items()}
import numpy as np
from ray.cluster_utils import Cluster as Nodes
from cotrain.config.schema import RunConfig
from cotrain.process.failures import RunFailure

nodes, size = Nodes(), {"num_cpus": 4, "object_store_memory": 100 * 2**20}
here = nodes.add_node(**size, include_dashboard=False)
os.environ |= {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
poor = nodes.add_node(**size)
del os.environ["RAY_memory_usage_threshold"]
lost = nodes.add_node(**size)
task = {"type": "reasoning_gym", "name": "chain_sum"}
fields = {"name": "deaths", "steps": 1, "policy": {"model": "tiny:llama"}, "task": task, "cluster": {"address": nodes.address}}
cluster = Cluster(RunConfig(**fields), Path.cwd(), "--resume deaths")

class Role:
    def __init__(self, *args): self.other = args[0] if args else None
    def pid(self): return os.getpid()
    def end(self): os._exit(1)
    def sleep(self): time.sleep(60)
    def answer(self): return np.zeros(2**21)
    def wait_for_other(self):
        import ray
        ray.get(self.other.sleep.remote())

class Broken:
    def __init__(self): raise ImportError("no module of that name")
    def pid(self): pass

def failure(*references):
    try:
        return cluster.get(list(references), 20)
    except RunFailure as failure:
        return str(failure)

found, agent = {}, cluster.start_agent
alive = agent(Role, here.node_id)
found["ended"] = failure(alive.pid.remote(), agent(Role, here.node_id).end.remote())
found["never began"] = failure(agent(Broken, here.node_id).pid.remote())
found["memory"] = failure(agent(Role, poor.node_id).sleep.remote())
away = agent(Role, lost.node_id)
failure(away.pid.remote())
answer, under_way = away.answer.remote(), away.sleep.remote()
waits = agent(Role, here.node_id, away).wait_for_other.remote()
cluster._ray.wait([answer], fetch_local=False)
nodes.remove_node(lost, allow_graceful=False)
found["node"], found["answer"], found["waits for it"] = failure(under_way), failure(answer), failure(waits)
found["on a lost node"] = failure(agent(Role, lost.node_id).pid.remote())
found["alive"] = failure(alive.pid.remote())
cluster.stop()
nodes.shutdown()
print(json.dumps(found))
"""


@pytest.mark.engine
@pytest.mark.long
def test_each_way_in_which_ray_reports_a_death_is_one_line_with_its_cause(tmp_path: Path) -> None:
    """A role that ends, that Ray's memory monitor kills, that is on a node which is lost, that waits for such a one."""
    found = run(DEATHS, tmp_path)
    assert isinstance(found.pop("alive")[0], int)
    assert "has been marked dead" in (tmp_path / "ray.log").read_text()
    causes = {
        "ended": "its process has died: killed from outside, or out of memory",
        "never began": "its process could not start: ImportError: no module of that name",
        "memory": r"Ray ended its process because its node ran out of memory \(\S+ used / \S+\): lower .*",
        "node": "its node is gone: .*",
        "answer": "its answer is lost, .*",
        "waits for it": "its node is gone: .*",
        "on a lost node": "its node is gone: .*",
    }
    for name, cause in causes.items():
        line = rf"Ray's logs of [^:]+: {cause}\. See Ray's logs of .*\. What was saved is whole: go on with --resume deaths"
        assert re.fullmatch(line, found[name]), (name, found[name])
