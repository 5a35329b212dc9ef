"""The arguments that vLLM starts with: cotrain's own, then the user's, then those of speculation. Imports vLLM late."""

from dataclasses import dataclass, field
from typing import Any

from cotrain.config.schema import RolloutConfig
from cotrain.models.capability import has_gated_delta_net
from cotrain.models.loading import CPU_BLOCK_TOKENS
from cotrain.records import Versions
from drafters.base import ServingSpec
from drafters.files import read_config, text_fields

PACKAGE = "cotrain.engine"
"""vLLM imports our classes by name in its own process; importing them here as well would only take time."""

PROMPT_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Arguments that vLLM's n-gram look-up needs, whose place the history takes."""

GRAPH_ARGUMENTS = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}


@dataclass(frozen=True)
class EngineSpec:
    rollout: RolloutConfig
    model_path: str
    drafter_folder: str | None  # checkpoint folder of the first serving drafter; None runs without a drafter
    serving: ServingSpec | None
    seed: int
    scratch: str  # folder in shared memory for features and weights of this engine
    versions: Versions = field(default_factory=lambda: Versions(0, 0))
    weight_transfer: str = "files"  # how the policy's weights arrive, see PolicyConfig
    adapters: bool = False  # whether the policy trains adapters, so that updates carry only what these change
    synthetic_rates: tuple[float, ...] = ()
    """By draft position, the share of drafts that is accepted whatever they are, for `cotrain bench --synthetic` alone: the text then
    means nothing, and no field of a configuration sets it. Empty: drafts are verified."""

    @property
    def speculates(self) -> bool:
        """Whether anything proposes draft tokens."""
        return self.drafter_folder is not None or self.rollout.history is not None


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """The arguments of AsyncEngineArgs. Raises ValueError when there are fewer GPUs than tensor-parallel ranks.

    vLLM decides whether scheduling is asynchronous, except in an engine with a history: its drafts are looked up on the host,
    from the tokens of the step that has just ended.
    """
    from vllm.platforms import current_platform

    rollout, on_cpu, policy = spec.rollout, current_platform.is_cpu(), read_config(spec.model_path)
    arguments: dict[str, Any] = {
        "max_num_seqs": rollout.max_num_seqs,
        # vLLM copies the states of linear attention with Triton kernels only
        "enable_prefix_caching": not has_gated_delta_net(policy),
        "model": spec.model_path,
        "dtype": rollout.dtype,
        "seed": spec.seed,
        # With spare positions: vLLM stops drafting for the whole batch when one request comes as close to the end as drafts are long.
        "max_model_len": rollout.positions(None if spec.serving is None else spec.serving.method),
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{PACKAGE}.worker_extension.CotrainWorker",
    }
    if on_cpu:
        from cotrain.engine.cpu import CPU_ARGUMENTS

        # A prompt is found in the prefix cache by whole blocks, and vLLM's 128 tokens are more than many prompts have.
        arguments |= CPU_ARGUMENTS | {"block_size": CPU_BLOCK_TOKENS}
        if "kv_lora_rank" in text_fields(
            policy
        ):  # latent attention; the copies of vLLM's AMX backend are not read back
            arguments["attention_backend"] = "CPU_MLA"
    if "text_config" in policy:
        arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0}  # its image encoder is neither loaded nor updated
    if (ranks := rollout.tensor_parallel_size) > 1:
        if not on_cpu and (num_gpus := current_platform.device_count()) < ranks:
            raise ValueError(f"rollout.vllm.tensor_parallel_size: {ranks} is above the {num_gpus} GPUs here; lower it")
        # In a placement group of Ray, vLLM would otherwise ask Ray for workers.
        arguments["distributed_executor_backend"] = "mp"
    speculation = _speculation(spec)
    if rollout.history is not None:
        arguments["async_scheduling"] = False
    if speculation is not None:
        # vLLM would not use the last cached block of a prompt, because the drafter's last key and value in it follow from the
        # token behind it. The samples of a prompt have that token in common, and a block is a large part of a prompt on a CPU.
        speculation |= {"disable_eagle_block_drop": True} if on_cpu else {}
        if not on_cpu and not GRAPH_ARGUMENTS & rollout.vllm.keys():
            arguments["cudagraph_capture_sizes"] = graph_sizes(rollout.max_num_seqs, rollout.num_speculative_tokens)
    if spec.weight_transfer != "files":
        arguments["weight_transfer_config"] = {"backend": spec.weight_transfer}
    arguments |= rollout.vllm
    if speculation is not None:
        arguments["speculative_config"] = speculation
        arguments["per_request_spec_decode_metrics"] = "detailed"  # acceptance is judged at the lengths really drafted
        if spec.serving is not None and spec.serving.target_overrides:
            arguments["hf_overrides"] = dict(spec.serving.target_overrides)
    return arguments


def _speculation(spec: EngineSpec) -> dict[str, Any] | None:
    """vLLM's speculative_config; None when nothing proposes draft tokens."""
    config: dict[str, Any] = {"num_speculative_tokens": spec.rollout.num_speculative_tokens}
    if spec.drafter_folder is None or spec.serving is None:
        # A history without a drafter takes the place of vLLM's look-up of n-grams.
        return {"method": "ngram", **config, **PROMPT_LOOKUP} if spec.speculates else None
    method, draws = spec.serving.method, spec.rollout.draft_sample_method
    if spec.synthetic_rates:  # the drafter has weights, and the policy's are vLLM's dummies
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [*spec.synthetic_rates]}
        config |= {"draft_load_config": {"load_format": "auto"}}
    return {"method": method, "model": spec.drafter_folder, "draft_sample_method": draws, **config}


def scheduler_for(is_asynchronous: bool) -> str:
    """Return the name of our scheduler that extends the one which vLLM would take."""
    return f"{PACKAGE}.scheduling.{'OverlappingScheduler' if is_asynchronous else 'DraftLengthScheduler'}"


def graph_sizes(max_num_seqs: int, num_speculative_tokens: int) -> list[int]:
    """Return the numbers of rows that CUDA graphs are captured for: up to max_num_seqs requests, with and without drafts.
    vLLM's own list ends at 512 rows, and larger steps run without a graph, such as 256 requests with 2 draft tokens each."""
    requests = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted({n * rows for n in requests if n <= max_num_seqs for rows in (1, num_speculative_tokens + 1)})
