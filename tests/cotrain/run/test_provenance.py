import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.run.provenance import begin_attempt, config_hash, differing_versions, flatten, git_state
from cotrain.run.run_dir import RunDir


def test_every_attempt_is_recorded_without_host_or_home(run_config, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(Path.home() / "bin/cotrain"), "train", f"{Path.home()}/a.toml", "steps=3"])
    with RunDir(tmp_path, "a", resumed=False) as run:
        for step in range(2):
            begin_attempt(run, run_config(), step)
        attempts = json.loads(run.provenance.read_text())["attempts"]
        assert len(attempts) == 2
        assert attempts[0]["argv"] == ["cotrain", "train", "~/a.toml", "steps=3"]
        assert attempts[0]["packages"].keys() >= {"python", "torch", "transformers"}
        assert attempts[0]["machine"]["cores"] == len(os.sched_getaffinity(0))
        for private in (platform.node(), f"{Path.home()}/"):
            assert private not in run.provenance.read_text()


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "repo" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    git = ["git", "-C", str(package), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    return package


def test_uncommitted_changes_are_kept(checkout):
    state, diff = git_state(checkout)
    assert len(state["commit"]) == 40 and not state["dirty"] and diff == ""
    (checkout / "__init__.py").write_text("x = 2\n")
    state, diff = git_state(checkout)
    assert state["dirty"] and "+x = 2" in diff


def test_an_installed_package_inside_a_repository_is_no_checkout(checkout):
    installed = checkout / "site-packages"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert git_state(installed) == (None, "")


def test_the_config_hash_covers_what_decides_a_step(run_config, tmp_path):
    one = run_config()
    assert config_hash(one) == config_hash(
        run_config(name="b", steps=9, run_root=tmp_path, cluster={"strategy": "SPREAD"})
    )
    assert config_hash(one) != config_hash(run_config(seed=1))


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_another_version_on_one_node_is_named_and_equal_ones_are_not():
    facts = {"node 0": {"python": "3.11.7", "torch": "2.13.0", "vllm": "0.32.0"}}
    assert differing_versions(facts | {"node 1": facts["node 0"]}) == []
    other = facts["node 0"] | {"torch": "2.12.1"}
    del other["vllm"]
    assert differing_versions(facts | {"node 1": other}) == [
        "torch is 2.13.0 on node 0, 2.12.1 on node 1",
        "vllm is 0.32.0 on node 0, missing on node 1",
    ]
