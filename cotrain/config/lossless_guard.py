"""vLLM settings that are known to make speculation lossy, by vLLM's own names (0.32), with the reason and the fix.

Speculation is lossless when every emitted token is drawn from the distribution that the policy alone would have given
it. A setting that is not listed here is judged by its effect: by `cotrain verify` before a run, by the monitor
(cotrain/lossless/monitor.py) during one. Imports no torch and no vLLM.
"""

from collections.abc import Iterator, Mapping
from typing import Any

OTHER_MODEL = (
    "makes the engine compute another model than the one the learner trains; change the folder at policy.model instead"
)
OTHER_DISTRIBUTION = (
    "changes which tokens can be drawn, outside of the accept/reject rule; use rollout.temperature, top_p and top_k"
)
QUANTISED = (
    "quantises the target: scales taken over a batch make a token's logits depend on the draft tokens verified beside "
    "it, and weights that arrive in rollout.dtype cannot be read back; leave it out"
)
FOREIGN_CACHE = (
    "lets keys and values come from elsewhere than this engine, where a policy update does not reach them; leave it out"
)
RANDOM_STATE = "rounds recurrent state at random, so that a prefix has other logits each time; leave it out"
SHARDED = (
    "shards the engine, but weights are read back on unsharded engines only; add replicas with rollout.num_engines"
)
OTHER_SPECULATION = "is another way to set speculative_config; set [drafter], rollout.num_speculative_tokens and rollout.draft_sample_method"
COTRAINS_OWN = "is set by cotrain, whose scheduler and worker depend on it; leave it out"
UNCORRECTED = "runs a model runner in which cotrain's corrections of vLLM's sampling have no effect; set it to 0"
PLUGIN = "loads code that can replace any part of sampling; set it to an empty string"


def _refused(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


ENGINE = _refused(
    {
        QUANTISED: "quantization quantization_config kv_cache_dtype attention_config.use_prefill_query_quantization",
        OTHER_DISTRIBUTION: "logits_processors watermark_config",
        OTHER_MODEL: "hf_overrides hf_config_path model_class_overrides model_weights load_format enable_lora",
        FOREIGN_CACHE: "kv_transfer_config kv_offloading_size",
        RANDOM_STATE: "enable_mamba_cache_stochastic_rounding",
        SHARDED: "pipeline_parallel_size data_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size enable_expert_parallel",
        OTHER_SPECULATION: "spec_method spec_model spec_tokens",
        COTRAINS_OWN: "additional_config worker_cls",
    }
)
ENVIRONMENT = _refused(
    {
        UNCORRECTED: "VLLM_USE_V2_MODEL_RUNNER",
        PLUGIN: "VLLM_PLUGINS",
        OTHER_MODEL: "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_MODEL_REDIRECT_PATH VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        QUANTISED: "VLLM_CPU_INT4_W4A8 VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG "
        "VLLM_MARLIN_INPUT_DTYPE VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    }
)
HARMLESS: dict[str, tuple[Any, ...]] = {
    "kv_cache_dtype": ("auto", "bfloat16", "float16"),  # a plain cast gives a token the same entry in every batch
    "load_format": ("auto", "safetensors"),
    **dict.fromkeys((name for name in ENGINE if name.endswith("_parallel_size")), (1,)),
}
"""Values with which a setting passes, beside those that switch it off: empty, false, or "0" in the environment."""


def engine_problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, reason and fix) of every vLLM engine argument that is known to be lossy, in nested tables too."""
    tables = {name: value for name, value in arguments.items() if isinstance(value, Mapping)}
    nested = {f"{table}.{name}": value for table in tables for name, value in tables[table].items()}
    yield from _problems({**arguments, **nested}, ENGINE)


def environment_problems(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The same for the VLLM_* variables of an engine's environment, for example os.environ."""
    for name, reason in _problems({k: v for k, v in environment.items() if v != "0"}, ENVIRONMENT):
        yield name, f"{environment[name]!r} {reason.replace('leave it out', 'unset it')}"


def _problems(settings: Mapping[str, Any], refused: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if name in refused and value and value not in HARMLESS.get(name, ()):
            use = f", or use {' or '.join(map(repr, HARMLESS[name]))}" if name in HARMLESS else ""
            yield name, f"{refused[name]}{use}"
