"""vLLM settings that are known to make speculation lossy, by vLLM's own names (0.32), with the reason and the fix.

Speculation is lossless when every emitted token is drawn from the distribution that the policy alone would have given
it. A setting that is not listed here is judged by its effect: by `cotrain verify` before a run, by the monitor
(cotrain/lossless/monitor.py) during one. Imports no torch and no vLLM.
"""

from collections.abc import Iterator, Mapping
from typing import Any

REASONS = {
    "quantises the target: scales taken over a batch make a token's logits depend on the draft tokens verified beside "
    "it, and weights that arrive in rollout.dtype cannot be read back; leave it out": (
        "quantization quantization_config kv_cache_dtype attention_config.use_prefill_query_quantization "
        "VLLM_CPU_INT4_W4A8 VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_MARLIN_INPUT_DTYPE "
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE"
    ),
    "makes the engine compute another model than the one the learner trains; change the folder at policy.model": (
        "hf_overrides hf_config_path disable_sliding_window model_class_overrides model_weights load_format enable_lora "
        "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_MODEL_REDIRECT_PATH VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
    ),
    "changes which tokens can be drawn, outside of the accept/reject rule; use rollout.temperature, top_p and top_k": (
        "logits_processors watermark_config"
    ),
    "changes at which tokens a response ends, which is read in the policy's folder; change its generation_config.json": (
        "generation_config skip_tokenizer_init"
    ),
    "lets keys and values come from elsewhere than this engine, where a policy update does not reach them; leave it "
    "out": "kv_transfer_config kv_offloading_size",
    "rounds recurrent state at random, so that a prefix has other logits each time; leave it out": (
        "enable_mamba_cache_stochastic_rounding"
    ),
    "divides an engine in another way than tensor_parallel_size, or over nodes; add engines with rollout.num_engines": (
        "pipeline_parallel_size data_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "enable_expert_parallel distributed_executor_backend nnodes node_rank master_addr master_port"
    ),
    "is sequence parallelism, with which no rank has whole hidden states for the feature tap; leave it out": (
        "enable_hc_sp compilation_config.pass_config.enable_sp"
    ),
    "is set by cotrain: set policy.model": "model tokenizer",
    "is set by cotrain: set rollout.dtype": "dtype",
    "is set by cotrain: set seed": "seed",
    "is set by cotrain: set rollout.max_prompt_tokens and rollout.max_new_tokens": "max_model_len",
    "is set by cotrain: set [drafter], rollout.num_speculative_tokens and rollout.draft_sample_method": (
        "speculative_config spec_method spec_model spec_tokens"
    ),
    "is set by cotrain: set policy.weight_transfer": "weight_transfer_config",
    "is set by cotrain: its draft lengths, updates, feature tap and metrics depend on it; leave it out": (
        "additional_config worker_cls worker_extension_cls scheduler_cls async_scheduling logprobs_mode disable_log_stats "
        "per_request_spec_decode_metrics"
    ),
    "runs a model runner in which cotrain's corrections of vLLM's sampling have no effect; set it to 0": (
        "VLLM_USE_V2_MODEL_RUNNER"
    ),
    "loads code that can replace any part of sampling; set it to an empty string": "VLLM_PLUGINS",
}
"""Engine arguments and environment variables that are refused, grouped by the reason and the fix."""

REFUSED = {name: reason for reason, names in REASONS.items() for name in names.split()}

OWNED = frozenset(name for name in REFUSED if "is set by cotrain" in REFUSED[name])
ALWAYS_REFUSED = OWNED.union(
    name for name in REFUSED if "divides" in REFUSED[name] or "sequence parallelism" in REFUSED[name]
)
"""Arguments that are refused even without speculation, because cotrain sets them or cannot serve an engine divided like that."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "kv_cache_dtype": ("auto", "bfloat16", "float16"),  # a plain cast gives a token the same entry in every batch
    "load_format": ("auto", "safetensors"),
    "generation_config": ("auto", "vllm"),
    "nnodes": (1,),
    **dict.fromkeys((name for name in REFUSED if name.endswith("_parallel_size")), (1,)),
}
"""Values for which a setting is accepted, besides those that switch it off: empty, false, or "0" in the environment."""


def engine_problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, reason and fix) for every vLLM engine argument known to be lossy, including those in nested tables."""
    for name, value in _dotted(arguments).items():
        if name in OWNED or (name in REFUSED and value and value not in HARMLESS.get(name, ())):
            use = f", or use {' or '.join(map(repr, HARMLESS[name]))}" if name in HARMLESS else ""
            yield name, f"{REFUSED[name]}{use}"


def _dotted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name: _dotted(value) for name, value in arguments.items() if isinstance(value, Mapping)}
    return {**arguments, **{f"{table}.{name}": value for table in tables for name, value in tables[table].items()}}


def environment_problems(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value with reason and fix) for every such VLLM_* variable of an environment, for example os.environ."""
    for name, value in environment.items():
        if name in REFUSED and value not in ("", "0"):
            yield name, f"{value!r} {REFUSED[name].replace('leave it out', 'unset it')}"
