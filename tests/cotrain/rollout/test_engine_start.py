"""What an engine refuses before vLLM is there, and what vLLM is started with."""

import asyncio
from pathlib import Path

import pytest

from cotrain.config.schema import RolloutConfig
from cotrain.config.speculation import SpeculationConfig
from cotrain.rollout import engine as engine_module
from cotrain.rollout.engine import RolloutEngine
from cotrain.rollout.spec import EngineSpec
from cotrain.rollout.speculation.controller import SpeculationController
from cotrain.rollout.vllm.arguments import engine_arguments
from drafters.base import Serving

K = 2


def spec_of(folder: Path, drafter: str | None = "drafter", **rollout: object) -> EngineSpec:
    config = RolloutConfig.model_validate(
        {"draft_tokens": K, "prompts_per_step": 2, "samples_per_prompt": 4, **rollout}
    )
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text("{}")
    return EngineSpec(config, str(folder), drafter, Serving("eagle3", (1, 2, 3)), 0, str(folder))


@pytest.mark.parametrize("drafter", ["drafter", None])
def test_variables_that_may_change_sampling_are_refused_with_speculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str | None
) -> None:
    monkeypatch.setenv("VLLM_NEW_AND_UNKNOWN", "1")
    engine_module._check_environment.cache_clear()
    engine = RolloutEngine(spec_of(tmp_path, drafter))
    if drafter:
        with pytest.raises(ValueError, match="environment variable VLLM_NEW_AND_UNKNOWN: '1' is not known"):
            asyncio.run(engine.start())
    assert engine.speculates == (drafter is not None)


def test_the_scheduler_is_told_where_the_controllers_files_are(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    controller = SpeculationController(SpeculationConfig(), K, spec.rollout.max_num_seqs, tmp_path)
    arguments = engine_arguments(spec, controller)
    assert sorted(arguments["additional_config"].values()) == sorted([controller.table_path, controller.log_path])
    assert all(Path(file).exists() for file in arguments["additional_config"].values())
    assert arguments["max_num_seqs"] == controller.max_batch == 8
    assert arguments["speculative_config"]["num_speculative_tokens"] == K
    assert arguments["per_request_spec_decode_metrics"] == "detailed"  # counts are sorted by draft length


def test_without_speculation_there_is_neither_controller_nor_file(tmp_path: Path) -> None:
    arguments = engine_arguments(spec_of(tmp_path, None), None)
    assert "speculative_config" not in arguments and "additional_config" not in arguments


def test_states_of_linear_attention_are_not_cached_unless_asked_for(tmp_path: Path) -> None:
    assert engine_arguments(spec_of(tmp_path), None)["enable_prefix_caching"]
    (tmp_path / "config.json").write_text('{"linear_num_value_heads": 2}')
    assert not engine_arguments(spec_of(tmp_path), None)["enable_prefix_caching"]
    assert engine_arguments(spec_of(tmp_path, vllm={"enable_prefix_caching": True}), None)["enable_prefix_caching"]
