"""`cotrain evaluate` up to where an engine would start; tests/engine/test_runs.py has the command on one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cotrain.config.load import read_config, to_toml
from cotrain.config.schema import RunConfig
from cotrain.models.loading import resolve_model
from drafters.files import weight_files
from pipelines import evaluate
from pipelines.cli import main
from pipelines.export import command

VALIDATION = {
    "task": {"type": "reasoning_gym", "name": "chain_sum"},
    "num_prompts": 4,
    "samples_per_prompt": 2,
    "temperature": 0.5,
}


@pytest.fixture
def run(run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run without a drafter, with one checkpoint."""
    monkeypatch.setattr(command, "find_defect", lambda folder: None)
    folder = tmp_path / "mine"
    policy = folder / "checkpoints" / "step_000002" / "policy"
    shutil.copytree(resolve_model("tiny:llama"), policy)
    config: RunConfig = run_config(policy={"model": "tiny:llama"}, drafter=None, validation=VALIDATION)
    (folder / "config.json").write_text(config.model_dump_json())
    (policy.parent / "state.json").write_text(json.dumps({"versions": {"policy": 2, "drafter": 0}}))
    return folder


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """What `cotrain evaluate` would start an engine with."""
    seen = []

    async def generate(setup: Any, held_out: Any, seed: int) -> Any:
        seen.append((setup, held_out, weight_files(setup.model)))
        raise ValueError("no engine here")

    monkeypatch.setattr(evaluate, "_generate", generate)
    monkeypatch.setenv("COTRAIN_RUN_ROOT", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no engine here"):
        evaluate.main([*arguments, "--out", str(tmp_path / "out")])
    return seen[0]


def test_a_runs_newest_policy_meets_the_held_out_prompts(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, held_out, weights = prepared(tmp_path, monkeypatch, str(run), "validation.num_prompts=3")
    assert setup.model.name == "policy" and len(weights) == 1 and setup.drafter is None
    assert len(held_out.prompts) == 3 and len(held_out.requests) == 6 and held_out.sampling == {"temperature": 0.5}


def test_a_policys_folder_needs_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder, config = str(resolve_model("tiny:llama")), tmp_path / "mine.toml"
    assert main(["evaluate", folder]) == 2
    assert "CONFIG: " in capsys.readouterr().err
    config.write_text(Path("configs/smoke.toml").read_text())
    assert main(["evaluate", folder, str(config)]) == 2
    assert "validation: there is no such table" in capsys.readouterr().err
    config.write_text(config.read_text() + '[validation.task]\ntype = "reasoning_gym"\nname = "chain_sum"\n')
    setup, held_out, _ = prepared(tmp_path, monkeypatch, folder, str(config), "policy.model=/nowhere")
    assert str(setup.model) == folder and setup.drafter is None and len(held_out.prompts) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validation.num_prompts=5000"], "validation.num_prompts: 5000 is more than the 1000 prompts"),
        (["rollout.vllm.gpu_memory=1"], "rollout.vllm.gpu_memory: vLLM has no such engine argument"),
        (["validation=none"], "validation: there is no such table"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(run: Path, arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["evaluate", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_is_evaluated_by_its_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(to_toml(read_config(run / "config.json")))
    setup, _, _ = prepared(tmp_path, monkeypatch, "bundled:smollm2-135m-instruct", str(config))
    assert setup.model == resolve_model("bundled:smollm2-135m-instruct")


def test_what_is_no_run_is_refused_by_name(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_RUN_ROOT", str(tmp_path))
    assert main(["evaluate", "nowhere"]) == 2
    assert "'nowhere' is neither a run" in capsys.readouterr().err
