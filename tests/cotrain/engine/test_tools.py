"""Environments in real processes of a real Ray, called as an engine calls them, by tools that break in every way."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SHOP = """
import os, time

class Shop:
    def __init__(self, item):
        self.item, self.said = item, []

    def messages(self):
        return [{"role": "user", "content": f"Buy {self.item}."}]

    def step(self, text):
        self.said.append(text)
        if text == "raise":
            raise LookupError("no such shelf")
        if text == "hang":
            time.sleep(3600)
        if text == "die":
            os._exit(1)
        return None if text == "done" else f"{text}?"

    def reward(self):
        return len(self.said)

    def close(self):
        open(f"{self.item} was closed", "w").close()
"""

SCRIPT = """
import asyncio, json
from pathlib import Path
from types import SimpleNamespace
from cotrain.actors.environments import start_environments
from cotrain.config.schema import RunConfig
from cotrain.engine.tools import ToolFailed
from cotrain.models.loading import resolve_model
from cotrain.process.cluster import Cluster

task = {"type": "environment", "factory": "shop:Shop", "path": "read_by_nobody.jsonl", "step_timeout_s": 60.0}
config = RunConfig(name="tools", steps=1, policy={"model": "bundled:smollm2-135m-instruct"}, task=task)
cluster = Cluster(config, Path.cwd())
model = resolve_model(config.policy.model)
nodes = SimpleNamespace(call=lambda node, function, *args: function(*args), model_path=model)
tools = start_environments(cluster, nodes, config)

async def play(environment, row, *texts):
    try:
        await environment.begin(row)
        return [len(await environment.step(text, 2) or []) for text in texts] + [await environment.reward()]
    except ToolFailed as failure:
        environment.forget()
        return str(failure)

async def begun(environment, row):
    await environment.begin(row)
    return environment

async def all_of_them():
    found = {"answered": await play(tools.of("a", 0), {"item": "a"}, "what", "how", "done")}
    found["raised"], found["beside"] = await asyncio.gather(
        play(tools.of("b", 0), {"item": "b"}, "raise"), play(tools.of("c", 0), {"item": "c"}, "what", "done"))
    found["hung"] = await play(tools._replace(step_timeout_s=1.0).of("d", 0), {"item": "d"}, "hang")
    found["after it hung"] = await play(tools.of("e", 0), {"item": "e"}, "what", "done")
    found["wrong row"] = await play(tools.of("f", 0), {"thing": "f"}, "done")
    other = await begun(tools.of("g", 0), {"item": "g"})
    found["died"], found["with it"] = await asyncio.gather(
        play(tools.of("h", 0), {"item": "h"}, "die"), play(tools.of("i", 0), {"item": "i"}, "hang"))
    found["begun again"] = await play(tools.of("j", 0), {"item": "j"}, "what", "done")
    try:
        await other.step("what", 2)
    except ToolFailed as failure:
        found["lost with it"] = str(failure)
    return found

found = asyncio.run(all_of_them())
cluster.stop()
print(json.dumps(found))
"""


def test_a_tool_that_breaks_fails_its_own_trajectory_and_a_process_that_dies_what_ran_in_it(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second, last, reward = found["answered"]
    assert first > 5 and second > 5 and (last, reward) == (0, 3)
    assert found["raised"] == "LookupError: no such shelf"
    assert found["beside"] == found["after it hung"] == found["begun again"] == [first, 0, 2]
    assert found["hung"] == "no answer in 1 s"
    assert found["wrong row"].startswith("TypeError") and "'thing'" in found["wrong row"]
    assert found["died"] == found["with it"] == "its process has died"
    assert found["lost with it"] == "KeyError: 'g'"
    closed = {path.name[0] for path in tmp_path.glob("* was closed")}
    assert closed == {"a", "b", "c", "d", "e", "j"}, "whether it ended or failed, but in the process that died"
