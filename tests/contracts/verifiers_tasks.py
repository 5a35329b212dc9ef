"""Task sets of verifiers as environments, with its own harness and tool servers: make test-contracts.

VERIFIERS names a folder with the extra cotrain[verifiers] and uv. The harness makes itself an environment from PyPI, once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.runs import metrics_of

ROOT = Path(__file__).parents[2]
ADDED = Path(os.environ["VERIFIERS"]).resolve()
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}:{ADDED}:{ROOT / 'tests' / 'contracts'}",
    "PATH": f"{ADDED / 'bin'}:{os.environ['PATH']}",
}
NULL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}

TOLD = """
import json, sys
from cotrain.tasks.verifiers_environments import VerifiersEnvironments

make = VerifiersEnvironments(json.loads(sys.argv[1]), 5)
found = {"rows": make.rows}
first = make(3)
found["messages"], found["tools"] = first.messages(), [tool["function"]["name"] for tool in first.tools()]
found["turns"] = [first.step(text) for text in json.loads(sys.argv[2])]
found["reward"] = first.reward()
cut = make(4)
cut.step(json.loads(sys.argv[2])[0])
found["cut"] = cut.reward()
found["cut at once"] = make(4).reward()
for one in (first, cut):
    one.close()
print(json.dumps(found))
"""


def told(table: dict, *texts: str) -> dict:
    """What the environments of a table say to a policy that says these texts."""
    command = [sys.executable, "-c", TOLD, json.dumps(table), json.dumps(texts)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_harness_calls_its_tools_and_rewards_what_the_policy_said() -> None:
    table = {"taskset": {"id": "verifiers_sums"}, "id": "single-agent", "agent": NULL}
    call = '<tool_call>{"name": "adding_add", "arguments": {"a": 3, "b": 7}}</tool_call>'
    found = told(table, f"I add. {call}", "It is 10.")
    assert found["rows"] == [{"index": index} for index in range(5)], "task.size bounds the tasks"
    assert found["messages"] == [{"role": "user", "content": "3 + 7?"}] and found["tools"] == ["adding_add"]
    assert found["turns"] == ["10", None] and found["reward"] == 1
    assert found["cut"] == found["cut at once"] == 0, "a trajectory that reached a limit is rewarded as it is"


def test_a_user_of_verifiers_asks_again() -> None:
    table = {"taskset": {"id": "verifiers_sums"}, "solver": NULL}
    found = told(table, "9?", "It is 12.", "It is 10.")
    assert found["turns"] == ["Sure? (1)", "Sure? (2)", None] and found["reward"] == 1


@pytest.mark.engine
def test_a_run_trains_on_trajectories_of_verifiers(tmp_path: Path) -> None:
    config = tmp_path / "sums.toml"
    config.write_text(
        (ROOT / "configs" / "smoke.toml").read_text().partition("[task]")[0]
        + '[task]\ntype = "environment"\nsize = 4\nmax_turn_tokens = 12\nstep_timeout_s = 120\nnum_environments = 2\n'
        + '[task.verifiers]\ntaskset = { id = "verifiers_sums", task = { tools = false } }\n'
        + '[task.verifiers.solver]\nharness = { id = "null" }\nruntime = { type = "subprocess" }\n'
    )
    settings = ["steps=2", "name=sums", f"run_root={tmp_path}", "rollout.synchronous_batches=false",
                "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=120",
                "rollout.stop=['7','e','a','s','t']"]  # fmt: skip
    command = [sys.executable, "-m", "cotrain", "train", str(config), *settings]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics_of(tmp_path, "sums")
    assert [row["stream/failed_trajectories"] for row in rows] == [0, 0]
    assert all(row["policy/rollout_log_prob_gap"] < 1e-4 for row in rows)
    assert "rollout/acceptance_turn_2" in rows[-1]
    with (tmp_path / "sums" / "samples" / "step_000001.jsonl").open() as samples:
        assert any("Sure? (1)" in json.loads(line)["response"] for line in samples)
