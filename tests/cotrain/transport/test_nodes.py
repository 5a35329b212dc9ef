"""Files of a node: what its agent does, without Ray."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.run.provenance import package_versions
from cotrain.transport import nodes
from cotrain.transport.nodes import NodeAgent


def test_a_file_arrives_in_parts_and_takes_its_name_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "PART_BYTES", 10)
    content = np.arange(37, dtype=np.uint8)
    source, target = tmp_path / "source", tmp_path / "from-other" / "policy.safetensors"
    source.write_bytes(content.tobytes())
    target.parent.mkdir()
    target.write_bytes(b"the version before")

    def call(function: Callable[..., Any], *args: Any) -> Any:
        assert target.read_bytes() == b"the version before"
        return function(*args)

    agent, other = NodeAgent(), SimpleNamespace(call=SimpleNamespace(remote=call))
    monkeypatch.setattr("ray.get", lambda answer: answer)
    agent.pull(other, str(source), str(target), move=False)
    assert target.read_bytes() == content.tobytes() and len(list(target.parent.iterdir())) == 1


def test_an_agent_says_what_its_node_has() -> None:
    agent = NodeAgent()
    scratch, versions = agent.folder("run"), agent.call(package_versions)
    assert scratch.is_dir() and {"python", "cotrain", "torch", "ray", "transformers"} < versions.keys()
    agent.close()
    assert not scratch.exists()
