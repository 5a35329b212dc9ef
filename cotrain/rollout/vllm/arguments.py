"""What vLLM is started with: cotrain's own arguments, then the user's, then those of speculation. Imports vLLM late."""

from pathlib import Path
from typing import Any

from cotrain.config.lossless_guard import speculative_problems
from cotrain.models.linear_attention import has_linear_attention
from cotrain.rollout.spec import EngineSpec

PROMPT_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Lengths of the n-grams that n-gram speculation looks up; vLLM's default, 5 exactly, hardly ever finds one."""


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Raises ValueError for a setting of speculation that is not known to be lossless."""
    from cotrain.rollout.vllm import scheduling, weight_transfer, worker_extension

    rollout, k = spec.rollout, spec.rollout.draft_tokens
    arguments: dict[str, Any] = {
        "max_num_seqs": rollout.max_num_seqs,
        "enforce_eager": True,
        # vLLM copies the states of linear attention with Triton kernels only
        "enable_prefix_caching": not has_linear_attention(Path(spec.model_path)),
        "async_scheduling": False,  # DraftLengthScheduler is the synchronous one
        "model": spec.model_path,
        "dtype": rollout.dtype,
        "seed": spec.seed,
        # k+1 spare positions: vLLM stops drafting for the whole batch when one request comes this close to the end
        "max_model_len": rollout.num_positions,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        "worker_extension_cls": f"{worker_extension.__name__}.CotrainWorker",
        "weight_transfer_config": {"backend": weight_transfer.BACKEND},
        "scheduler_cls": f"{scheduling.__name__}.DraftLengthScheduler",
    }
    arguments |= rollout.vllm
    if spec.speculation == "ngram":
        arguments["speculative_config"] = {"method": "ngram", "num_speculative_tokens": k, **PROMPT_LOOKUP}
    elif spec.drafter_folder is not None and spec.serving is not None:
        if spec.serving.target_overrides:
            arguments["hf_overrides"] = dict(spec.serving.target_overrides)
        arguments["speculative_config"] = {
            "method": spec.serving.method,
            "model": spec.drafter_folder,
            "num_speculative_tokens": k,
            "draft_sample_method": rollout.draft_sample_method,
        }
    if "speculative_config" in arguments:
        for name, reason in speculative_problems(arguments["speculative_config"]):
            raise ValueError(f"speculative_config.{name}: {reason}")
        arguments["per_request_spec_decode_metrics"] = "detailed"  # acceptance is judged at the lengths really drafted
    return arguments
