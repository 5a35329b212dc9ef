"""The parts of vLLM that our code wraps, calls and reads, as they are in the version that we know.

When a function or an attribute of these tables has moved, an engine refuses to start, and `cotrain doctor` says why.
"""

import ast
import dis
import functools
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

KNOWN_VERSION = "0.32"
SIDECAR_VERSIONS = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""Versions of vLLM whose engines cotrain may join when somebody else starts them."""

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
DRAFTING = "vllm.v1.spec_decode.llm_base_proposer"
PROPOSER = f"{DRAFTING}:SpecDecodeBaseProposer"
SAMPLING = "vllm.v1.sample.rejection_sampler"
MOE_METHOD = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
LINEAR_ATTENTION = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
RELOAD = "vllm.model_executor.model_loader.reload"
TRANSFER = "vllm.distributed.weight_transfer"
KERNELS = "vllm.triton_utils.dispatcher"
ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"

WRAPPED = {
    f"{RUNNER}.propose_draft_token_ids": "self scheduler_output sampled_token_ids sampling_metadata hidden_states "
    "sample_hidden_states aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings",
    f"{RUNNER}._sample": "self logits spec_decode_metadata",
    f"{RUNNER}.take_draft_token_ids": "self",
    f"{SCHEDULER}.schedule": "self throttle_prefills",
    f"{SCHEDULER}.update_from_output": "self scheduler_output model_runner_output",
    f"{SCHEDULER}.update_draft_token_ids": "self draft_token_ids",
    f"{SCHEDULER}.set_pause_state": "self pause_state",
}
"""Functions that ours replace, with all their parameters in order."""

WORKER = "vllm.v1.worker.gpu_worker:Worker"
SIDECAR = {path: names for path, names in WRAPPED.items() if not path.startswith(RUNNER)} | {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "self usage_context headless",
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls": "self",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": "self",
    f"{SCHEDULER}._free_request": "self request delay_free_blocks",
    f"{WORKER}.load_model": "self",
    f"{WORKER}.finish_weight_update": "self",
    f"{WORKER}.reload_weights": "self",
    f"{WORKER}.wake_up": "self tags",
    f"{WORKER}.get_draft_model": "self",
    f"{RELOAD}.layerwise:initialize_layerwise_reload": "model",
    f"{RELOAD}.layerwise:finalize_layerwise_reload": "",
}
"""Functions that the sidecar replaces or calls in all of SIDECAR_VERSIONS, with their positional parameters in order."""

SPECULATOR_TAKES = [
    "input_batch",
    "attn_metadata",
    "slot_mappings",
    "last_hidden_states",
    "aux_hidden_states",
    "num_sampled",
]
SIDECAR_OF_RUNNER = {
    False: {path: names for path, names in WRAPPED.items() if path.startswith(RUNNER)}
    | {f"{RUNNER}.execute_model": "self scheduler_output intermediate_tensors"},
    True: {
        f"{RUNNER_V2}.execute_model": "self scheduler_output intermediate_tensors dummy_run ...",
        f"{RUNNER_V2}.take_draft_token_ids": "self",
        f"{RUNNER_V2}.get_draft_model": "self",
        f"{SPECULATOR}.propose": f"self {' '.join(SPECULATOR_TAKES)} ...",
    },
}
"""The same for each model runner: False is V1, True is V2. Where "..." stands, other parameters may follow."""

WRAPPED_ON_CPU = {
    f"{KERNELS}:_rebind_kernels": "overrides",
    f"{SAMPLING}:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    f"{SAMPLING}:sample_recovered_tokens": "max_spec_len num_draft_tokens cu_num_draft_tokens draft_token_ids "
    "draft_probs target_probs sampling_metadata device use_fp64_gumbel",
    f"{RUNNER}.sample_tokens": "self grammar_output",
    f"{PROPOSER}._sample_draft_tokens": "self hidden_states sampling_metadata",
    f"{DRAFTING}:empty_exponential_noise_like": "probs use_fp64_gumbel",
    f"{DRAFTING}:sample_with_exponential_noise": "probs q",
    f"{MOE_METHOD}._setup_kernel": "self layer w13 w2",
    f"{LINEAR_ATTENTION}:_spec_forward": "layer attn_metadata_i mixed_qkv_spec b_spec a_spec conv_buf ssm_state width "
    "state_len",
}

USED = {
    RUNNER: "_get_positions input_batch input_ids drafter device model_config compilation_config discard_request_mask "
    "num_spec_tokens _draft_probs _draft_prob_req_ids requests",
    PROPOSER: "model block_size max_num_tokens net_num_new_slots_per_request _enable_probabilistic_draft_probs "
    "_draft_attn_layer_names",
    f"{PROPOSER}.propose": "num_speculative_tokens target_token_ids target_positions target_hidden_states "
    "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata",
    SCHEDULER: "dynamic_sd_lookup num_spec_tokens scheduler_config has_unfinished_requests vllm_config requests",
    "vllm.v1.request:Request": "spec_decode_metrics",
    "vllm.v1.metrics.stats:RequestSpecDecodeMetrics": "per_step_drafted per_step_accepted num_spec_tokens",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_spec_tokens_to_schedule num_scheduled_tokens "
    "scheduled_spec_decode_tokens scheduled_new_reqs",
    "vllm.v1.sample.metadata:SamplingMetadata": "all_greedy all_random temperature",
    "vllm.v1.outputs:ModelRunnerOutput": "sampled_token_ids req_id_to_index",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens num_reqs "
    "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping seq_lens_cpu_upper_bound",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_reqs generators num_tokens_no_spec num_prompt_tokens "
    "token_ids_cpu vocab_size",
    "vllm.v1.utils:CpuGpuBuffer": "gpu",
    "vllm.v1.worker.gpu_worker:Worker": "get_model get_draft_model speculative_config rank "
    "init_weight_transfer_engine start_weight_update update_weights finish_weight_update",
    "vllm.v1.engine.input_processor:InputProcessor.assign_request_id": "request_id",
    f"{RELOAD}:initialize_layerwise_reload": "model",
    f"{RELOAD}:finalize_layerwise_reload": "",
    f"{TRANSFER}.factory:WeightTransferTrainerFactory.trainer_init": "init_info client source",
    f"{TRANSFER}.nccl_engine:NCCLTrainerInitInfo": "rank master_address master_port world_size",
    f"{TRANSFER}.ipc_engine:IPCTrainerInitInfo": "rank packed",
    "vllm.model_executor.model_loader.mtp_validation:disable_mtp_completeness_check": "",
    "vllm.model_executor.models.utils:WeightsMapper": "orig_to_new_substr orig_to_new_prefix apply_list",
    "vllm.model_executor.layers.linear:QKVParallelLinear": "num_heads num_kv_heads head_size input_size",
    "vllm.model_executor.layers.linear:RowParallelLinear": "input_size_per_partition tp_rank",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": "shard_indices embedding_dim",
    "vllm.distributed.parallel_state:GroupCoordinator": "rank_in_group world_size cpu_group",
    f"{ENGINE}.add_request": "request_id prompt params",
    f"{ENGINE}.pause_generation": "mode clear_cache",
    f"{ENGINE}.collective_rpc": "method args",
    ENGINE: "resume_generation update_weight_version reset_prefix_cache shutdown errored engine_core model_config",
    "vllm.v1.engine.core_client:AsyncMPClient": "call_utility_async",
    "vllm.outputs:CompletionOutput": "token_ids logprobs weight_versions spec_decode_metrics finish_reason",
    "vllm.v1.metrics.stats:RequestStateStats": "first_token_ts last_token_ts",
    "vllm.sampling_params:SamplingParams": "skip_reading_prefix_cache output_kind ignore_eos",
    "vllm.engine.arg_utils:AsyncEngineArgs": "worker_extension_cls scheduler_cls async_scheduling speculative_config "
    "per_request_spec_decode_metrics logprobs_mode cudagraph_capture_sizes",
}
"""Classes with the attributes that we read or set, and functions with the parameters that we pass."""

USED_ON_CPU = {
    f"{PROPOSER}._sample_from_logits": "logits sampling_metadata",
    "vllm.v1.engine.utils:get_mp_context": "",
    "vllm.v1.executor.multiproc_executor:get_mp_context": "",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "cpu_linear",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts": "isa _use_zentorch",
    "vllm._custom_ops:cpu_prepack_moe_weight": "weight isa",
    "vllm._custom_ops:causal_conv1d_weight_pack": "weight",
}


def wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replace a function of a module, class or object by `hook`, once. `hook` gets the original as its first argument."""
    original = getattr(owner, name)
    if not hasattr(original, "cotrain_hook"):
        wrapped: Any = functools.wraps(original)(lambda *args, **options: hook(original, *args, **options))
        wrapped.cotrain_hook = hook
        setattr(owner, name, wrapped)


def attach(carrier: Any, record: object) -> None:
    """Let an object of vLLM's carry a record of ours to where vLLM sends it: with a step to the workers, or with drafts back."""
    carrier.cotrain = record


def attached(carrier: Any) -> Any:
    """Return the record that an object of vLLM's carries, or None."""
    return getattr(carrier, "cotrain", None)


def moved() -> list[str]:
    """Return what is not as in KNOWN_VERSION: what was expected and what is there. Imports vLLM, which takes 6 s."""
    from vllm.platforms import current_platform

    tables = [(WRAPPED, True), (USED, False)]
    if current_platform.is_cpu():
        tables += [(WRAPPED_ON_CPU, True), (USED_ON_CPU, False)]
    return [
        problem
        for table, is_wrapped in tables
        for path, names in table.items()
        for problem in _differences(path, names, is_wrapped)
    ]


def moved_in(sources: Path, table: dict[str, str]) -> list[str]:
    """Return what differs from a table like SIDECAR in the sources of a vLLM, by name. Nothing is imported.

    sources: the folder that holds the package's folder `vllm`.
    """
    found = {path: parameters_in(sources, path) for path in table}
    return [
        f"{path} takes ({found[path]}) instead of ({names})"
        for path, names in table.items()
        if found[path] != names and not (names.endswith(" ...") and f"{found[path]} ".startswith(names[:-3]))
    ]


def parameters_in(sources: Path, path: str) -> str | None:
    """The positional parameters of module:function or module:Class.method, or None where there is no such function."""
    module, _, names = path.partition(":")
    file = sources / f"{module.replace('.', '/')}.py"
    body: list[Any] = _parsed(file).body if file.exists() else []
    place: Any = None
    for name in names.split("."):
        place = next((node for node in body if getattr(node, "name", None) == name), None)
        body = getattr(place, "body", [])
    return None if place is None else " ".join(argument.arg for argument in place.args.args)


@functools.lru_cache(maxsize=4)  # entries of the tables that are in one file follow each other
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _differences(path: str, names: str, is_wrapped: bool) -> list[str]:
    try:
        place = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        place = None
    if place is None or getattr(place, "__isabstractmethod__", False):
        return [f"{path} is missing"]
    if is_wrapped:
        found = " ".join(inspect.signature(place).parameters)
        return [] if found == names else [f"{path} takes ({found}) instead of ({names})"]
    missing = _not_in_class if inspect.isclass(place) else _not_in_function
    return [f"{path} has no {name}" for name in sorted(missing(place, set(names.split())))]


def _not_in_function(function: Any, names: set[str]) -> set[str]:
    """Return the names that are neither parameters of the function nor used in it."""
    return names - {*inspect.signature(function).parameters, *inspect.unwrap(function).__code__.co_names}


def _not_in_class(owner: type, names: set[str]) -> set[str]:
    """Return the names that are no attributes and that no method sets. A name that is only read counts as missing."""
    names = names - set(dir(owner))
    for base in owner.__mro__:
        names -= {*getattr(base, "__annotations__", ())}
        for method in filter(inspect.isfunction, vars(base).values()):
            code = inspect.unwrap(method).__code__
            if names & {*code.co_names}:
                names -= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return names
