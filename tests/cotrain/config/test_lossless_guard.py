"""Engine settings known to be lossy are refused with the reason and the fix; what is not known to be passes."""

import subprocess
import sys

import pytest

from cotrain.config import lossless_guard as guard
from cotrain.process.threads import engine_environment


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        ({"quantization": "fp8"}, "quantization", "logits depend on the draft tokens verified beside it"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "or use 'auto' or 'bfloat16' or 'float16'"),
        ({"logits_processors": ["mine.Processor"]}, "logits_processors", "outside of the accept/reject rule"),
        ({"watermark_config": {"key": 1}}, "watermark_config", "use rollout.temperature"),
        ({"load_format": "dummy"}, "load_format", "another model"),
        ({"hf_overrides": {"rope_theta": 1.0}}, "hf_overrides", "policy.model"),
        ({"enable_lora": True}, "enable_lora", "policy.model"),
        ({"disable_sliding_window": True}, "disable_sliding_window", "another model than the one the learner trains"),
        ({"generation_config": "/elsewhere"}, "generation_config", "at which tokens a response ends"),
        ({"spec_method": "ngram"}, "spec_method", "set [drafter]"),
        ({"kv_transfer_config": {"x": 1}}, "kv_transfer_config", "a policy update does not reach"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "rollout.num_engines"),
        ({"nnodes": 2}, "nnodes", "over nodes"),
        ({"enable_hc_sp": True}, "enable_hc_sp", "sequence parallelism"),
        (
            {"compilation_config": {"pass_config": {"enable_sp": True}}},
            "compilation_config.pass_config.enable_sp",
            "whole hidden states",
        ),
        ({"additional_config": {"x": 1}}, "additional_config", "set by cotrain"),
        (
            {"attention_config": {"use_prefill_query_quantization": True}},
            "attention_config.use_prefill_query_quantization",
            "quantises",
        ),
    ],
)
def test_a_lossy_engine_argument_is_refused_with_reason_and_fix(arguments: dict, key: str, words: str) -> None:
    [(name, message)] = guard.engine_problems(arguments)
    assert name == key
    assert words in message


def test_other_engine_arguments_pass() -> None:
    arguments = {
        "max_num_seqs": 4,
        "kv_cache_dtype": "bfloat16",
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "pass_config": {"enable_sp": False}},
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "enable_lora": False,
        "generation_config": "vllm",
        "an_argument_of_another_version": True,
    }
    assert list(guard.engine_problems(arguments)) == []


def test_all_problems_are_told() -> None:
    assert len(list(guard.engine_problems({"quantization": "fp8", "enable_lora": True, "max_num_seqs": 1}))) == 2


def test_environment_of_cotrains_engines_passes_and_what_changes_logits_does_not() -> None:
    harmless = {"HOME": "/root", "VLLM_PLUGINS": "", "VLLM_CPU_INT4_W4A8": "0", "VLLM_FROM_THE_FUTURE": "1"}
    assert list(guard.environment_problems(engine_environment(2) | harmless)) == []
    bad = {
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
        "VLLM_TEST_FORCE_LOAD_FORMAT": "dummy",
        "VLLM_MODEL_REDIRECT_PATH": "/x",
        "VLLM_CPU_INT4_W4A8": "1",
        "VLLM_PLUGINS": "mine",
    }
    problems = dict(guard.environment_problems(bad))
    assert set(problems) == set(bad)
    assert problems["VLLM_CPU_INT4_W4A8"].endswith("unset it")


@pytest.mark.parametrize(
    ("environment", "on_cpu", "has_history", "expected"),
    [
        ({}, True, True, []),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, True, True, []),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, False, False, []),
        (
            {"VLLM_USE_V2_MODEL_RUNNER": "1"},
            False,
            True,
            ["'1': only V1 drafts from a history; unset it, or leave out"],
        ),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, True, False, ["'1': vLLM's CPU build has no Triton"]),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}, True, False, []),
    ],
)
def test_a_model_runner_that_cannot_do_what_a_run_needs_is_refused(
    environment: dict[str, str], on_cpu: bool, has_history: bool, expected: list[str]
) -> None:
    problems = list(guard.model_runner_problems(environment, on_cpu, has_history))
    assert [name for name, _ in problems] == ["VLLM_USE_V2_MODEL_RUNNER"] * len(expected)
    assert all(reason.startswith(start) for (_, reason), start in zip(problems, expected, strict=True))


@pytest.mark.parametrize(
    ("environment", "has_history", "expected"),
    [
        ({}, False, []),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, False, []),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, False, ["VLLM_USE_V2_MODEL_RUNNER"]),
        ({}, True, ["rollout.history"]),
    ],
)
def test_dspark_is_drafted_with_by_model_runner_v2_alone(
    environment: dict[str, str], has_history: bool, expected: list[str]
) -> None:
    found = [name for name, _ in guard.model_runner_problems(environment, False, has_history, "dspark")]
    assert found == expected
    assert not list(guard.model_runner_problems(environment, False, False, "dflash"))


def test_the_guard_is_loaded_without_torch() -> None:
    code = "import sys, cotrain.config.lossless_guard; sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
