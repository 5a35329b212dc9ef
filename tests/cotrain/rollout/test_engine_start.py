"""What an engine refuses before vLLM is there, and what vLLM is started with."""

import asyncio
from pathlib import Path

import pytest

from cotrain.config.schema import RolloutConfig
from cotrain.rollout import engine as engine_module
from cotrain.rollout.engine import RolloutEngine
from cotrain.rollout.spec import EngineSpec
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


def test_the_draft_length_is_the_schedulers(tmp_path: Path) -> None:
    arguments = engine_arguments(spec_of(tmp_path))
    assert arguments["scheduler_cls"].endswith("DraftLengthScheduler") and arguments["max_num_seqs"] == 8
    assert arguments["speculative_config"]["num_speculative_tokens"] == K
    assert arguments["per_request_spec_decode_metrics"] == "detailed"  # counts are sorted by draft length


def test_without_a_drafter_nothing_is_speculated(tmp_path: Path) -> None:
    assert "speculative_config" not in engine_arguments(spec_of(tmp_path, None))


def test_states_of_linear_attention_are_not_cached_unless_asked_for(tmp_path: Path) -> None:
    assert engine_arguments(spec_of(tmp_path))["enable_prefix_caching"]
    (tmp_path / "config.json").write_text('{"linear_num_value_heads": 2}')
    assert not engine_arguments(spec_of(tmp_path))["enable_prefix_caching"]
    assert engine_arguments(spec_of(tmp_path, vllm={"enable_prefix_caching": True}))["enable_prefix_caching"]
