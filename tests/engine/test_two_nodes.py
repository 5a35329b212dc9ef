"""A whole run on two Ray nodes, with an engine on each."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_runs import metrics_of, train

pytestmark = pytest.mark.engine

BY_THE_CLOCK = ("time/", "idle/", "rollout/tokens_per_s", "rollout/tap_overhead", "gate/seconds", "gate/swap")


def facts(root: Path, name: str) -> list[dict[str, Any]]:
    """The metrics of a run without what the clock decides."""
    return [
        {key: value for key, value in row.items() if not key.startswith(BY_THE_CLOCK) and not key.endswith("_s")}
        for row in metrics_of(root, name)
    ]


def test_a_run_on_two_nodes_equals_one_on_one_host(address: str, tmp_path: Path) -> None:
    """To the last digit, and so does its resume."""
    smoke = ["configs/smoke.toml", "rollout.num_engines=2", "checkpoint.every=2", "steps=4"]
    train(tmp_path, *smoke, "name=one")
    spread = [f"cluster.address={address}", "cluster.strategy=SPREAD"]
    train(tmp_path, *smoke, "steps=2", "name=two", *spread)
    output = train(tmp_path, "--resume", "two", "steps=4")
    assert "prompts identical" in output and "DIFFERS" not in output
    assert facts(tmp_path, "two") == facts(tmp_path, "one")
    versions = [(tmp_path / name / "drafters").iterdir() for name in ("one", "two")]
    for one, two in zip(*map(sorted, versions), strict=True):
        assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
