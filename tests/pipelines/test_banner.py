"""What a run says of itself at its start."""

from pathlib import Path
from typing import Any

from cotrain.run.run_dir import RunDir
from pipelines.train.joint import banner


def test_the_banner_says_where_to_look(run_config: Any, tmp_path: Path) -> None:
    config = run_config(tracking={"uri": "http://host:5000"})
    with RunDir(tmp_path / "runs", "first", resumed=False) as run:
        gpus = {"policy": 1.0, "rollout_0": 0.5}
        lines = banner(config, run, tmp_path / "model", gpus)
    assert lines["run"] == str(run.path) and lines["steps"] == "4 (8 prompts x 8 samples)"
    assert lines["metrics"] == f"tail -f {run.metrics}" and lines["mlflow"] == "http://host:5000"
    assert lines["drafter"] == "eagle3 from random init" and lines["devices"] == "1.5 GPUs for 2 processes"
