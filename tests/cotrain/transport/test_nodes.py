"""Files of a node: what its agent does, without Ray."""

from pathlib import Path

import numpy as np
import pytest

from cotrain.transport import nodes
from cotrain.transport.nodes import NodeAgent


def test_a_file_arrives_in_parts_and_takes_its_name_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "PART_BYTES", 10)
    agent, content = NodeAgent("run"), np.arange(37, dtype=np.uint8)
    source, target = tmp_path / "source", agent.scratch / "from-other" / "policy.safetensors"
    source.write_bytes(content.tobytes())
    target.parent.mkdir()
    target.write_bytes(b"the version before")
    size = agent.size(str(source))
    for start in range(0, size, 10):
        assert target.read_bytes() == b"the version before"
        agent.write(str(target), start, agent.read(str(source), start), start + 10 >= size)
    assert target.read_bytes() == content.tobytes() and len(list(target.parent.iterdir())) == 1
    agent.remove(str(target))
    agent.remove(str(target))
    assert not target.exists()
    agent.close()
    assert not agent.scratch.exists()


def test_an_agent_says_what_its_node_has(tmp_path: Path) -> None:
    agent = NodeAgent("run")
    scratch, versions = agent.facts()
    assert scratch.is_dir() and {"python", "cotrain", "torch", "ray", "transformers"} < versions.keys()
    assert agent.read_text(tmp_path / "none") is None
    folder, fingerprints = agent.model("tiny:llama")
    assert folder.is_dir() and fingerprints["model"]
    with pytest.raises(ValueError, match=r"policy\.model"):
        agent.model("tiny:nothing")
    assert (
        "VLLM_USE_V2_MODEL_RUNNER" in agent.environment("engine")
        and agent.environment("rewards")["OMP_NUM_THREADS"] == "1"
    )
    agent.close()
