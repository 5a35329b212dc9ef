"""Only engine settings known to be lossless pass; the list is complete for the installed vLLM."""

import ast
import importlib.util
from pathlib import Path

import pytest

from cotrain.config import lossless_guard as guard
from cotrain.config.rules import OWNED_VLLM_ARGUMENTS
from cotrain.process.threads import engine_environment

VLLM = importlib.util.find_spec("vllm")


def refused(table: dict[str, frozenset[str]]) -> set[str]:
    return set().union(*table.values())


def fields_of(file: str, *classes: str) -> set[str]:
    """Annotated names of classes in vLLM's source: importing vLLM takes 5 s and changes the process."""
    assert VLLM is not None and VLLM.origin is not None
    nodes = ast.parse((Path(VLLM.origin).parent / file).read_text()).body
    found = {
        field.target.id
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.name in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    assert len(found) > 5
    return found


def environment_of_vllm() -> set[str]:
    assert VLLM is not None and VLLM.origin is not None
    tree = ast.parse((Path(VLLM.origin).parent / "envs.py").read_text())
    keys = {key.value for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys
            if isinstance(key, ast.Constant)}  # fmt: skip
    return {key for key in keys if str(key).startswith("VLLM_")}


def test_every_engine_argument_of_the_installed_vllm_is_classified() -> None:
    known = fields_of("engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs")
    classified = guard.ENGINE_ALLOWED | guard.ENGINE_VALUES.keys() | guard.ENGINE_KEYS.keys()
    classified |= refused(guard.ENGINE_REFUSED) | OWNED_VLLM_ARGUMENTS.keys()
    assert known - classified == set(), "decide for each whether it can change a sampled token"
    assert classified - known == set(), "gone from vLLM"


def test_every_speculative_key_of_the_installed_vllm_is_classified() -> None:
    known = fields_of("config/speculative.py", "SpeculativeConfig")
    classified = guard.SPECULATIVE_ALLOWED | guard.SPECULATIVE_VALUES.keys() | refused(guard.SPECULATIVE_REFUSED)
    assert known ^ classified == set()


def test_every_sampling_parameter_of_the_installed_vllm_is_classified() -> None:
    known = {name for name in fields_of("sampling_params.py", "SamplingParams") if not name.startswith("_")}
    assert known ^ (guard.SAMPLING_ALLOWED | refused(guard.SAMPLING_REFUSED)) == set()


@pytest.mark.parametrize(
    ("file", "owner", "argument"),
    [
        ("config/compilation.py", "CompilationConfig", "compilation_config"),
        ("config/attention.py", "AttentionConfig", "attention_config"),
        ("config/kernel.py", "KernelConfig", "kernel_config"),
    ],
)
def test_keys_that_pass_in_a_table_exist(file: str, owner: str, argument: str) -> None:
    assert guard.ENGINE_KEYS[argument] <= fields_of(file, owner)


def test_variables_that_pass_exist() -> None:
    assert guard.ENVIRONMENT_ALLOWED | guard.ENVIRONMENT_VALUES.keys() <= environment_of_vllm()


def test_nothing_is_both_allowed_and_refused() -> None:
    assert not guard.ENGINE_ALLOWED & (refused(guard.ENGINE_REFUSED) | OWNED_VLLM_ARGUMENTS.keys())
    assert not guard.SPECULATIVE_ALLOWED & refused(guard.SPECULATIVE_REFUSED)
    assert not guard.SAMPLING_ALLOWED & refused(guard.SAMPLING_REFUSED)


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        ({"quantization": "fp8"}, "quantization", "logits depend on the draft tokens verified beside it"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "'auto' or 'bfloat16' or 'float16'"),
        ({"logits_processors": ["mine.Processor"]}, "logits_processors", "outside of the accept/reject rule"),
        ({"watermark_config": {"key": 1}}, "watermark_config", "which tokens can be drawn"),
        ({"override_generation_config": {"temperature": 0.5}}, "override_generation_config", "rollout.temperature"),
        ({"load_format": "dummy"}, "load_format", "another model"),
        ({"hf_overrides": {"rope_theta": 1.0}}, "hf_overrides", "policy.model"),
        ({"spec_method": "ngram"}, "spec_method", "set [drafter]"),
        ({"kv_transfer_config": {}}, "kv_transfer_config", "a policy update does not reach"),
        ({"additional_config": {"x": 1}}, "additional_config", "set by cotrain"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "rollout.num_engines"),
        ({"max_num_seq": 4}, "max_num_seq", "did you mean max_num_seqs?"),
        ({"lossy_turbo": True}, "lossy_turbo", "not known to leave speculation lossless"),
        ({"compilation_config": {"pass_config": {}}}, "compilation_config.pass_config", "not known"),
        ({"attention_config": {"use_prefill_query_quantization": True}}, "attention_config.use_prefill_query", "not"),
        ({"compilation_config": 3}, "compilation_config", "must be a table"),
    ],
)
def test_engine_argument_is_refused_with_reason_and_way_on(arguments: dict, key: str, words: str) -> None:
    [(name, message)] = guard.engine_problems(arguments)
    assert name.startswith(key)
    assert words in message


def test_harmless_engine_arguments_pass() -> None:
    arguments = {
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.5,
        "kv_cache_dtype": "bfloat16",
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
        "block_size": 32,
    }
    assert list(guard.engine_problems(arguments)) == []


def test_all_problems_are_told() -> None:
    assert len(list(guard.engine_problems({"quantization": "fp8", "enable_lora": True, "max_num_seqs": 1}))) == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rejection_sample_method": "synthetic"}, "not the target's distribution"),
        ({"rejection_sample_method": "block"}, "use 'standard'"),
        ({"rejection_sample_method": "fly"}, "use 'standard'"),
        ({"synthetic_acceptance_length": 3.0}, "not the target's distribution"),
        ({"enable_adaptive_verification": True}, "biases"),
        ({"posterior_threshold": 0.09}, "not known"),  # typical acceptance of other versions and forks
        ({"method": "custom_class"}, "'eagle3' or 'mtp' or 'ngram'"),
    ],
)
def test_lossy_or_unknown_speculation_is_refused(config: dict, words: str) -> None:
    [(_, message)] = guard.speculative_problems(config)
    assert words in message


def test_speculation_as_cotrain_sets_it_passes() -> None:
    eagle = {"method": "eagle3", "model": "d", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert [*guard.speculative_problems(eagle), *guard.speculative_problems(ngram)] == []


def test_sampling_parameters_that_skip_draft_tokens_are_refused() -> None:
    problems = dict(guard.sampling_problems({"min_p": 0.1, "logit_bias": {}, "bad_words": ["x"], "temperature": 0.7}))
    assert set(problems) == {"min_p", "logit_bias", "bad_words"}
    assert "not applied to draft tokens" in problems["min_p"]


def test_environment_of_cotrains_engines_passes_and_what_changes_logits_does_not() -> None:
    assert list(guard.environment_problems(engine_environment(2) | {"HOME": "/root"})) == []
    bad = {
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
        "VLLM_TEST_FORCE_LOAD_FORMAT": "dummy",
        "VLLM_MODEL_REDIRECT_PATH": "/x",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_FROM_THE_FUTURE": "1",
    }
    assert {name for name, _ in guard.environment_problems(bad)} == set(bad)
