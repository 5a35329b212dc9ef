"""What the sidecar hooks into, held against the sources of each vLLM that it may join: make test-contracts.

Sources are only read, so that no vLLM has to be installed. VLLM_SOURCES names the folder that tests.contracts.sources
has filled.
"""

import ast
import functools
import os
from pathlib import Path

import pytest

from cotrain.engine.cpu import (
    BLOCK_DRAFTER,
    DRAFTING,
    EXPERTS,
    KERNELS,
    LINEAR_ATTENTION,
    MODEL_CLASS,
    PATCHES,
    PROPOSER,
    SAMPLING,
)
from cotrain.engine.host.adoption import HOST_HAS_SET
from cotrain.engine.interface import (
    RUNNER,
    SIDECAR,
    SIDECAR_OF_RUNNER,
    SIDECAR_VERSIONS,
    SPECULATOR_TAKES,
    moved_in,
    parameters_in,
)
from cotrain.engine.model_runner_v2 import LENGTH

SOURCES = Path(os.environ["VLLM_SOURCES"])

READ = {
    RUNNER: "_get_positions input_batch input_ids drafter device model_config discard_request_mask "
    "num_spec_tokens _draft_probs _draft_prob_req_ids requests",
    PROPOSER: "model block_size max_num_tokens net_num_new_slots_per_request _enable_probabilistic_draft_probs "
    "propose num_speculative_tokens target_token_ids target_positions target_hidden_states "
    "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata",
    "vllm.v1.sample.metadata:SamplingMetadata": "all_greedy all_random temperature",
    "vllm.v1.outputs:ModelRunnerOutput": "sampled_token_ids req_id_to_index",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens num_reqs "
    "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping seq_lens_cpu_upper_bound",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_reqs generators num_tokens_no_spec num_prompt_tokens "
    "token_ids_cpu vocab_size",
    "vllm.v1.utils:CpuGpuBuffer": "gpu",
    "vllm.model_executor.model_loader.mtp_validation:": "disable_mtp_completeness_check",
    "vllm.model_executor.models.utils:WeightsMapper": "orig_to_new_substr orig_to_new_prefix apply_list",
    "vllm.model_executor.layers.linear:QKVParallelLinear": "num_heads num_kv_heads head_size input_size",
    "vllm.model_executor.layers.linear:RowParallelLinear": "input_size_per_partition tp_rank",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": "shard_indices embedding_dim",
    "vllm.distributed.parallel_state:GroupCoordinator": "rank_in_group world_size cpu_group",
    "vllm.engine.arg_utils:EngineArgs": " ".join(HOST_HAS_SET) + " model worker_extension_cls",
    "vllm.config.vllm:VllmConfig": "instance_id use_v2_model_runner scheduler_config model_config parallel_config "
    "speculative_config load_config",
    "vllm.config.model:ModelConfig": "quantization runner_type hf_config get_hidden_size",
    "vllm.config.parallel:ParallelConfig": "world_size data_parallel_size",
    "vllm.config.scheduler:SchedulerConfig": "max_num_seqs async_scheduling",
    "vllm.v1.request:Request": "request_id sampling_params all_token_ids num_prompt_tokens num_tokens arrival_time "
    "get_finished_reason num_output_tokens is_finished drop_stale_output num_stale_output_tokens",
    "vllm.v1.core.sched.output:NewRequestData": "req_id prompt_token_ids prefill_token_ids sampling_params",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_cached_reqs total_num_scheduled_tokens "
    "num_spec_tokens_to_schedule num_scheduled_tokens scheduled_spec_decode_tokens scheduled_new_reqs",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids",
    "vllm.v1.core.sched.scheduler:Scheduler": "requests dynamic_sd_lookup num_spec_tokens scheduler_config "
    "has_unfinished_requests vllm_config",
    "vllm.sampling_params:SamplingParams": "temperature top_p top_k max_tokens extra_args",
    "vllm.v1.worker.gpu_worker:Worker": "_weight_update_active use_v2_model_runner get_model get_draft_model "
    "speculative_config rank init_weight_transfer_engine start_weight_update update_weights finish_weight_update",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "speculator model_config get_model get_draft_model",
    "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids num_reqs query_start_loc positions input_ids",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator": "num_speculative_steps model",
    "vllm.v1.outputs:DraftTokenIds": "draft_token_ids",
}
"""Names that the sidecar reads or passes, by the class or function that has them."""


CORRECTED = {
    f"{KERNELS}:_rebind_kernels": "overrides",
    f"{SAMPLING}:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    f"{SAMPLING}:sample_recovered_tokens": "max_spec_len num_draft_tokens cu_num_draft_tokens draft_token_ids "
    "draft_probs target_probs sampling_metadata device use_fp64_gumbel",
    f"{RUNNER}.sample_tokens": "self grammar_output",
    f"{PROPOSER}._sample_draft_tokens": "self hidden_states sampling_metadata",
    f"{DRAFTING}:empty_exponential_noise_like": "probs use_fp64_gumbel",
    f"{DRAFTING}:sample_with_exponential_noise": "probs q",
    f"{SAMPLING}:rejection_sample": "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs "
    "target_logits bonus_token_ids sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel",
    f"{BLOCK_DRAFTER}._normalize_context_k": "self all_k",
    f"{BLOCK_DRAFTER}._build_context_kv_buffers": "self layers_attn has_bias",
    f"{MODEL_CLASS}.load_model_cls": "self",
    f"{MODEL_CLASS}.inspect_model_cls": "self",
    f"{EXPERTS}._setup_kernel": "self layer w13 w2",
    f"{LINEAR_ATTENTION}:_spec_forward": "layer attn_metadata_i mixed_qkv_spec b_spec a_spec conv_buf ssm_state width "
    "state_len",
}
"""Functions that corrections of the CPU build replace, with all their parameters in order."""

FURTHER = {(f"{SAMPLING}:rejection_sample", "0.33"): " fly_window_size fly_entropy_threshold fly_entropy_top_k"}
"""Options that a later version has too, and that the correction passes on."""


@functools.cache
def identifiers(version: str, path: str) -> set[str]:
    """All names in the module that a path like those of READ begins with."""
    file = SOURCES / version / f"{path.partition(':')[0].replace('.', '/')}.py"
    fields = ("id", "attr", "arg", "name")
    nodes = ast.walk(ast.parse(file.read_bytes()))
    return {value for node in nodes for field in fields if isinstance(value := getattr(node, field, None), str)}


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_every_hook_has_the_known_signature(version: str) -> None:
    for table in (SIDECAR, *SIDECAR_OF_RUNNER.values()):
        assert moved_in(SOURCES / version, table) == []


V2 = "vllm.v1.worker.gpu.spec_decode"
AUTOREGRESSIVE = (
    f"{V2}.autoregressive.speculator:AutoRegressiveSpeculator",
    f"{V2}.target_dependent_ar.speculator:TargetDependentARSpeculator",
)
"""What drafts with EAGLE and MTP heads in model runner V2: the second since 0.32."""


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_the_v2_runner_hands_its_speculator_what_the_hook_takes(version: str) -> None:
    has_length = version >= "0.32"
    path = AUTOREGRESSIVE[has_length]
    assert moved_in(SOURCES / version, {f"{path}.propose": f"self {' '.join(SPECULATOR_TAKES)} ..."}) == []
    assert (LENGTH in (parameters_in(SOURCES / version, f"{path}.propose") or "").split()) is has_length
    file = SOURCES / version / f"{path.partition(':')[0].replace('.', '/')}.py"
    assert ("range(1, self.num_speculative_steps)" in file.read_text()) is not has_length
    for kind in ("eagle", "mtp"):
        names = identifiers(version, f"{V2}.{kind}.speculator:")
        assert path.partition(":")[2] in names and "propose" not in names, "it inherits it"
    runner = ast.parse((SOURCES / version / "vllm/v1/worker/gpu/model_runner.py").read_bytes())
    calls = [n for n in ast.walk(runner) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "propose"]
    dummy, real = calls
    keywords = [k.arg for k in dummy.keywords]
    assert "dummy_run" in keywords and keywords[: len(SPECULATOR_TAKES)] == SPECULATOR_TAKES
    given = [getattr(a, "id", "") for a in real.args[: len(SPECULATOR_TAKES)]]
    hidden = ["spec_hidden_states", "aux_hidden_states"]
    assert given == ["input_batch", "attn_metadata", "slot_mappings_by_layer", *hidden, "num_sampled"]
    assert (LENGTH in [k.arg for k in real.keywords]) is has_length
    places = ("model_runner.py", "spec_decode/utils.py")
    sources = [(SOURCES / version / "vllm/v1/worker/gpu" / place).read_text() for place in places]
    assert any("get_mtp_target_hidden_states" in source for source in sources)


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_every_name_that_is_read_is_there(version: str) -> None:
    missing = {path: names for path, text in READ.items() if (names := set(text.split()) - identifiers(version, path))}
    assert missing == {}


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_corrections_of_the_cpu_build_replace_what_they_know_or_nothing(version: str) -> None:
    found = {path: parameters_in(SOURCES / version, path) for path in CORRECTED}
    assert CORRECTED.keys() == {f"{owner}{'.' if ':' in owner else ':'}{name}" for owner, name in PATCHES.values()}
    known = {path: names + FURTHER.get((path, version), "") for path, names in CORRECTED.items()}
    differing = {path for path, names in found.items() if names is not None and names != known[path]}
    assert differing == set()
    missing = {path.partition(":")[2] for path, names in found.items() if names is None}
    imported = {"empty_exponential_noise_like", "sample_with_exponential_noise"}  # into the module that is corrected
    assert missing - imported <= {"_rebind_kernels"}  # vLLM searches for kernels since 0.31


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_every_process_of_an_engine_loads_plugins(version: str) -> None:
    for place in ("engine/arg_utils.py", "v1/engine/core.py", "v1/worker/worker_base.py"):
        assert "load_general_plugins()" in (SOURCES / version / "vllm" / place).read_text()
