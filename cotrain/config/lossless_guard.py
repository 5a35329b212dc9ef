"""Which engine settings leave the sampled distribution alone: the allow-list, by vLLM's own names (0.32).

Speculation is lossless when every emitted token is drawn from the distribution that the policy alone would have
given it. Only settings known to touch neither the accept/reject rule, nor the logits, nor the sampling pass; whatever
is not listed, because it is lossy, unchecked or newer than this list, is refused. Imports no vLLM.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

OTHER_MODEL = (
    "makes the engine compute another model than the one the learner trains and the drafter is distilled from; change "
    "the folder at policy.model instead"
)
OTHER_DISTRIBUTION = (
    "changes which tokens can be drawn, outside of the accept/reject rule that is checked; use rollout.temperature, "
    "top_p and top_k"
)
QUANTISED = (
    "quantises the target: scales taken over a batch make a token's logits depend on the draft tokens verified beside "
    "it, and weights that arrive in rollout.dtype cannot be read back; leave it out"
)
FOREIGN_CACHE = (
    "lets keys and values come from elsewhere than this engine, where a policy update does not reach them; leave it out"
)
RECURRENT = (
    "concerns recurrent or replayed state, whose roll-back after a rejected draft token has not been checked; leave it "
    "out"
)
SHARDED = (
    "shards the engine, but weights are read back and draft tokens are checked on unsharded engines; add replicas with "
    "rollout.num_engines"
)
OTHER_SPECULATION = (
    "is another way to set speculative_config; set [drafter], rollout.draft_tokens and rollout.draft_sample_method"
)
COTRAINS_OWN = "is set by cotrain, whose scheduler and worker depend on it; leave it out"
UNCHECKED = (
    "has not been checked against speculation, and rollouts of token ids do not need it; leave it out, or run without "
    "[drafter]"
)
DRAFT_DEPENDENT = (
    "lets the draft tokens that were drawn decide how many are verified, which biases the tokens that come out; leave "
    "it out"
)
LOSSY_ACCEPTANCE = "accepts draft tokens by a rule that is not the target's distribution; leave it out"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ENGINE_ALLOWED = _names(
    # memory, cache and batch sizes
    "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override block_size cpu_offload_gb cpu_offload_params "
    "offload_backend offload_group_size offload_num_in_group offload_prefetch_step offload_params watermark "
    "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs max_num_queued_reqs "
    "max_num_queued_tokens enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
    "enable_cumem_allocator enable_shm_tensor_arena "
    # scheduling and prefix cache: a hit brings the keys and values that a prefill would compute
    "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit "
    "enable_chunked_prefill long_prefill_token_threshold long_prefill_token_threshold_adaptive "
    "scheduler_reserve_full_isl prefill_schedule_interval scheduling_policy stream_interval disable_cascade_attn "
    "disable_hybrid_kv_cache_manager performance_mode "
    # how the same arithmetic is compiled and which kernels do it: rounding, the same with and without speculation
    "enforce_eager optimization_level cudagraph_capture_sizes max_cudagraph_capture_size attention_backend moe_backend "
    "linear_backend disable_custom_all_reduce enable_flashinfer_autotune ir_op_priority use_fp64_gumbel "
    # loading, naming, logging, reporting
    "served_model_name tokenizer_mode tokenizer_revision skip_tokenizer_init trust_remote_code download_dir hf_token "
    "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size use_tqdm_on_load "
    "pt_load_map_location max_parallel_loading_workers max_logprobs aggregate_engine_logging log_level logging_config "
    "log_config_file enable_log_requests show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
    "kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets "
    "cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details "
    "jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats profiler_config kv_events_config shutdown_timeout "
    "distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus "
    "fail_on_environ_validation ray_workers_use_nsight "
    # images, video and audio: rollouts are token ids
    "allowed_local_media_path allowed_media_domains limit_mm_per_prompt enable_mm_embeds interleave_mm_strings "
    "media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
    "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend skip_mm_profiling mm_tensor_ipc "
    "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize video_pruning_rate video_pruning_method "
    "disable_chunked_mm_input renderer_num_workers"
)
"""Engine arguments that pass whatever their value."""

ENGINE_VALUES: dict[str, tuple[Any, ...]] = {
    "kv_cache_dtype": ("auto", "bfloat16", "float16"),  # a plain cast gives a token the same entry in every batch
    "load_format": ("auto", "safetensors"),
    "generation_config": (
        "auto",
        "vllm",
    ),  # of it, only end-of-sequence ids reach requests with parameters of their own
    "model_impl": ("auto", "vllm"),
}
"""Engine arguments that pass with these values."""

ENGINE_KEYS = {
    "compilation_config": _names(
        "mode backend custom_ops splitting_ops compile_sizes compile_ranges_endpoints inductor_compile_config "
        "cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs "
        "max_cudagraph_capture_size use_inductor_graph_partition cache_dir compile_cache_save_format debug_dump_path "
        "dynamic_shapes_config"
    ),
    "attention_config": _names(
        "backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend"
    ),
    "kernel_config": _names("enable_flashinfer_autotune enable_jit_warmup ir_op_priority moe_backend linear_backend"),
}
"""Engine arguments that are tables, with the keys that pass."""

ENGINE_REFUSED = {
    OTHER_MODEL: _names(
        "model_weights hf_config_path hf_overrides model_class_overrides config_format runner convert revision "
        "code_revision model_loader_extra_config ignore_patterns language_model_only mm_encoder_only "
        "disable_sliding_window diffusion_config engram_config pooler_config load_format model_impl enable_lora "
        "max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_target_modules "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras "
        "max_lora_cls_labels"
    ),
    OTHER_DISTRIBUTION: _names(
        "logits_processors watermark_config generation_config override_generation_config structured_outputs_config "
        "reasoning_config reasoning_parser reasoning_parser_plugin enable_trace_replay"
    ),
    QUANTISED: _names(
        "quantization quantization_config allow_deprecated_quantization kv_cache_dtype kv_cache_dtype_skip_layers "
        "lora_dtype mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin"
    ),
    FOREIGN_CACHE: _names(
        "kv_transfer_config kv_offloading_size kv_offloading_backend kv_sharing_fast_prefill ec_transfer_config "
        "ec_manager_config enable_prompt_embeds"
    ),
    RECURRENT: _names(
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend "
        "mamba_ssu_algorithm enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds replayssm_buffer_len use_replayssm swa_bounded_replay gdn_prefill_backend "
        "kda_prefill_backend kda_decode_backend"
    ),
    SHARDED: _names(
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend "
        "dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size "
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend enable_hc_sp enable_expert_parallel "
        "enable_batch_sharded_sampling enable_ep_weight_filter all2all_backend enable_elastic_ep "
        "elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
        "dp_sync_interval disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy "
        "master_addr master_port nnodes node_rank device_ids enable_nccl_comm_suspend"
    ),
    OTHER_SPECULATION: _names("spec_method spec_model spec_tokens"),
    COTRAINS_OWN: _names(
        "additional_config worker_cls distributed_executor_backend _api_process_count _api_process_rank"
    ),
    UNCHECKED: _names(
        "enable_return_routed_experts return_sampling_mask aux_output_config sparse_indexer_topk_backend "
        "io_processor_plugin fault_tolerance_config enable_fault_tolerance tokens_only"
    ),
}
"""Engine arguments that are refused, by reason. An argument in none of these tables is refused as unknown."""

SPECULATIVE_ALLOWED = _names(
    # what proposes, and how many tokens: proposals never decide a token as long as their distribution is the stated one
    "model num_speculative_tokens num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min "
    "revision code_revision draft_load_config max_model_len "
    # the drafter's own arithmetic, number formats and cache
    "enforce_eager quantization moe_backend attention_backend kv_cache_dtype disable_padded_drafter_batch "
    "disable_eagle_block_drop use_local_argmax_reduction"
)
SPECULATIVE_VALUES: dict[str, tuple[Any, ...]] = {
    "method": ("eagle3", "mtp", "ngram"),
    "rejection_sample_method": ("standard",),
    "draft_sample_method": ("greedy", "probabilistic"),
}
SPECULATIVE_REFUSED = {
    LOSSY_ACCEPTANCE: _names("rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length"),
    DRAFT_DEPENDENT: _names("enable_adaptive_verification"),
    SHARDED: _names("draft_tensor_parallel_size tensor_parallel_size draft_parallel_config target_parallel_config"),
    UNCHECKED: _names(
        "method draft_sample_method index_share_for_mtp_iteration use_heterogeneous_vocab parallel_drafting "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
        "suffix_decoding_min_token_prob dspark_draft_topk draft_model_config target_model_config"
    ),
}

SAMPLING_ALLOWED = _names(
    "temperature top_p top_k seed n max_tokens stop stop_token_ids ignore_eos logprobs prompt_logprobs flat_logprobs "
    "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind "
    "stream_interval skip_clone output_text_buffer_length skip_reading_prefix_cache"
)
SAMPLING_REFUSED = {
    "is not applied to draft tokens by vLLM; use temperature, top_p and top_k": _names("min_p logit_bias"),
    OTHER_DISTRIBUTION: _names(
        "presence_penalty frequency_penalty repetition_penalty bad_words allowed_token_ids min_tokens "
        "structured_outputs thinking_token_budget watermarking trace_decode_token_ids repetition_detection"
    ),
    UNCHECKED: _names(
        "extra_args prompt_logprob_token_ids prompt_logprob_start logprob_token_ids routed_experts_prompt_start"
    ),
}

ENVIRONMENT_ALLOWED = _names(
    # where vLLM runs and what it writes
    "VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH "
    "VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_TARGET_DEVICE VLLM_WORKER_MULTIPROC_METHOD "
    "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_PROCESS_NAME_PREFIX VLLM_API_KEY VLLM_SERVER_DEV_MODE "
    "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MQ_MAX_CHUNK_BYTES_MB "
    "VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_SKIP_P2P_CHECK VLLM_ENABLE_CUDA_COMPATIBILITY "
    "VLLM_CUDA_COMPATIBILITY_PATH VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU "
    # what vLLM's container images set
    "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_DOCKER_BUILD_CONTEXT "
    "VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED "
    # logs and statistics
    "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX "
    "VLLM_LOGGING_COLOR VLLM_LOG_STATS_INTERVAL VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION "
    "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_TRACE_FUNCTION "
    "VLLM_DEBUG_DUMP_PATH VLLM_GC_DEBUG VLLM_DEBUG_WORKSPACE VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO "
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
    # compilation, memory layout, checks
    "VLLM_DISABLE_COMPILE_CACHE VLLM_USE_STANDALONE_COMPILE VLLM_USE_AOT_COMPILE VLLM_COMPILE_CACHE_SAVE_FORMAT "
    "VLLM_ENABLE_CUDAGRAPH_GC VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_KV_CACHE_LAYOUT VLLM_BATCH_INVARIANT "
    "VLLM_SSM_CONV_STATE_LAYOUT "
    "VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_DISABLE_SHARED_EXPERTS_STREAM "
    "VLLM_GPU_SYNC_CHECK VLLM_USE_FLASHINFER_SAMPLER"
)
ENVIRONMENT_VALUES = {
    "VLLM_USE_V2_MODEL_RUNNER": ("0",),  # draft sampling is corrected and checked on the V1 runner
    "VLLM_PLUGINS": ("",),  # a plug-in can replace any part of sampling
}


def engine_problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, reason and way on) of every vLLM engine argument that is not known to be lossless.

    Arguments that cotrain owns (config_rules.OWNED_VLLM_ARGUMENTS) must have been taken out before.
    """
    for name, value in arguments.items():
        if name not in ENGINE_KEYS:
            yield from _problem(name, value, ENGINE_ALLOWED, ENGINE_VALUES, ENGINE_REFUSED)
        elif not isinstance(value, Mapping):
            yield name, f"must be a table, got {value!r}"
        else:
            for key in value:
                for problem, message in _problem(key, value[key], ENGINE_KEYS[name], {}, {}):
                    yield f"{name}.{problem}", message


def speculative_problems(speculative_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for the keys of vLLM's speculative_config."""
    for name, value in speculative_config.items():
        yield from _problem(name, value, SPECULATIVE_ALLOWED, SPECULATIVE_VALUES, SPECULATIVE_REFUSED)


def sampling_problems(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for sampling parameters of a request, under the names of vLLM's SamplingParams."""
    for name, value in parameters.items():
        yield from _problem(name, value, SAMPLING_ALLOWED, {}, SAMPLING_REFUSED)


def environment_problems(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The same for the VLLM_* variables of an engine's environment, for example os.environ."""
    for name, value in environment.items():
        allowed = ENVIRONMENT_VALUES.get(name)
        if not name.startswith("VLLM_") or name in ENVIRONMENT_ALLOWED or (allowed and value in allowed):
            continue
        way_on = f"set it to {' or '.join(map(repr, allowed))}, or unset it" if allowed else "unset it"
        yield name, f"{value!r} is not known to leave logits and sampling alone; {way_on}, or run without [drafter]"


def _problem(
    name: str,
    value: Any,
    allowed: frozenset[str],
    values: Mapping[str, tuple[Any, ...]],
    refused: Mapping[str, frozenset[str]],
) -> Iterator[tuple[str, str]]:
    # Membership alone would let 1 pass as True, and fail on a table.
    if name in allowed or any(value == passing and type(value) is type(passing) for passing in values.get(name, ())):
        return
    known = sorted(allowed | values.keys())
    reason = next((reason for reason, names in refused.items() if name in names), None)
    if reason is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        reason = f"is not known to leave speculation lossless. {hint}Leave it out, or run without [drafter]"
    elif name in values:
        reason = f"{value!r} {reason} or use {' or '.join(map(repr, values[name]))}"
    yield name, reason
