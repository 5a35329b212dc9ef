"""The long form of the runs on several nodes: `make test-long`."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.conftest import ROOT
from tests.engine.runs import TIMEOUT_S
from tests.engine.test_two_nodes import SMOKE, facts, run, served, start
from tests.engine.two_nodes import FIRST, SECOND, THIRD, TwoNodes, cut_off, start_node
from tests.faults.runs import rows_in, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 24


def test_ten_steps_and_a_flipped_byte(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """To the last digit those of one host; then one node refuses a drafter, and neither serves it."""
    run(tmp_path, "one", *SMOKE, "name=one", "steps=10")
    spread = [f"cluster.address={two_nodes.address}", "cluster.strategy=SPREAD"]
    run(tmp_path, "two", *SMOKE, "name=two", "steps=5", *spread)
    run(tmp_path, "two", "--resume", "two", "steps=10")
    assert facts(tmp_path, "two") == facts(tmp_path, "one")
    assert served(tmp_path, "two") == served(tmp_path, "one")

    os.environ["FLIP"] = "10"
    try:
        output = run(tmp_path, "flipped", "--resume", "two", "steps=12")
    finally:
        del os.environ["FLIP"]
    assert "checksum differs" in output
    kinds = {row["step"]: row["kind"] for row in rows_in(tmp_path / "runs/two/decisions.jsonl")}
    assert (kinds[11], kinds[12]) == ("refused", "published")
    drafters = [row for row in rows_in(tmp_path / "flipped.jsonl") if row["update"] == "update_drafter"]
    refused, published = drafters
    before = served(tmp_path, "two")["update_drafter 9"]
    assert refused["served"] == [before] * 2 and refused["sent"] != before
    assert published["served"] == [published["sent"]] * 2


def test_a_worker_is_killed_and_a_node_fails_in_the_middle_of_a_run(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """With generation ahead of learning. The third node has an engine and nothing else."""
    third = start_node(two_nodes.address, THIRD, "127.0.0.3", 1, tmp_path)
    two_nodes.wait_for(FIRST, SECOND, THIRD)
    ahead = ["rollout.synchronous_batches=false", "stream.max_policy_lag=1", "rollout.num_engines=3"]
    ahead += ["rollout.max_new_tokens=160", "cluster.strategy=SPREAD", f"cluster.address={two_nodes.address}"]
    process = start(tmp_path, "lost", *SMOKE, *ahead, "name=lost", f"steps={STEPS}")
    events = tmp_path / "runs/lost/stream.jsonl"

    def all_generate(engines: int) -> bool:
        rows = rows_in(events)
        past_step_3 = any(row["event"] == "taken" and row["step"] == 3 for row in rows)
        return past_step_3 and len({row["engine"] for row in in_flight(rows)}) == engines

    wait_until(lambda: all_generate(3), process, "groups on three engines", every_s=0.005)
    children = psutil.Process(two_nodes.second.pid).children(recursive=True)
    [worker] = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: rows_in(tmp_path / "lost.jsonl")[-1]["update"] == "come_back", process, "engine that comes back")
    wait_until(lambda: all_generate(3), process, "groups on three engines again", every_s=0.005)
    cut_off(third)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    rows = rows_in(events)
    groups = [row["group"] for row in rows if row["event"] == "taken"]
    assert groups == list(range(4 * STEPS))
    lost = [row for row in rows if row["event"] == "lost"]
    assert rows_in(tmp_path / "runs/lost/metrics.jsonl")[-1]["stream/lost_groups"] == len(lost)
    policy, drafter = (row for row in rows_in(tmp_path / "lost.jsonl") if row["update"] == "come_back")
    killed, came_back = policy["engine"], drafter["time"]
    assert len({row["engine"] for row in lost}) == 2 and killed in {row["engine"] for row in lost}
    died = next(row["time"] for row in lost if row["engine"] == killed)
    given = [row["time"] for row in rows if row["event"] == "dispatched" and row["engine"] == killed]
    assert not any(died < moment < policy["time"] for moment in given) and any(moment > came_back for moment in given)
    for row in rows_in(tmp_path / "lost.jsonl"):
        assert row["served"] and all(digests == row["sent"] for digests in row["served"])


def test_a_worker_that_is_killed_takes_its_own_groups_alone(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Without lag, in step 2: the other engine's tokens are those of a run in which nothing happens."""
    two_nodes.wait_for(FIRST, SECOND)
    long = [*SMOKE, "rollout.max_new_tokens=250", "steps=3"]
    run(tmp_path, "quiet", *long, "name=quiet")
    spread = [f"cluster.address={two_nodes.address}", "cluster.strategy=SPREAD"]
    process = start(tmp_path, "killed", *long, "name=killed", *spread)
    events = tmp_path / "runs/killed/stream.jsonl"

    def engine_starts() -> list[psutil.Process]:
        children = psutil.Process(two_nodes.second.pid).children(recursive=True)
        return [child for child in children if "EngineCore" in " ".join(child.cmdline())]

    wait_until(lambda: any(r["event"] == "taken" for r in rows_in(events)), process, "step 1")
    [worker] = engine_starts()
    step_2 = lambda: [r for r in rows_in(events) if r["event"] == "dispatched" and r["step"] == 2]
    wait_until(step_2, process, "step 2", every_s=0.005)
    os.kill(worker.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    rows = rows_in(events)
    lost = {row["group"] for row in rows if row["event"] == "lost"}
    assert len(lost) == 2 and lost <= set(range(4, 8))
    assert [row["group"] for row in rows if row["event"] == "taken"] == list(range(12))
    quiet, killed = (
        [json.loads(line) for line in (tmp_path / f"runs/{name}/samples/step_000002.jsonl").read_text().splitlines()]
        for name in ("quiet", "killed")
    )
    same = [one == other for one, other in zip(quiet, killed, strict=True)]
    assert len(same) == 4 and len(lost & {4, 5}) == 1  # samples of the step's first two groups, one on each engine
    assert [same[0] and same[1], same[2] and same[3]] == [4 not in lost, 5 not in lost]


def in_flight(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups that an engine generates now: where each was dispatched to."""
    last = {row["group"]: row for row in rows if row["event"] in ("dispatched", "finished", "lost")}
    return [row for row in last.values() if row["event"] == "dispatched"]


def test_the_doctor_names_a_node_with_another_package(two_nodes: TwoNodes, tmp_path: Path) -> None:
    two_nodes.wait_for(FIRST, SECOND)
    package = two_nodes.packages / "cotrain-9.9.9.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cotrain\nVersion: 9.9.9\n")
    asked = ["doctor", "--address", two_nodes.address, "--only", "run", "--json", str(tmp_path / "doctor.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COTRAIN_RUN_ROOT": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "pipelines.cli", *asked]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    (package / "METADATA").unlink()
    package.rmdir()
    assert done.returncode == 1, done.stdout + done.stderr
    [check] = json.loads((tmp_path / "doctor.json").read_text())["checks"]
    assert check["status"] == "fail" and re.search(r"cotrain is .*9\.9\.9 on ", check["found"])
