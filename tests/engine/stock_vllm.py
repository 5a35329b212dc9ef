"""A model folder in stock vLLM: python stock_vllm.py MODEL DTYPE SPECULATION, the JSON of vLLM's --speculative-config.

Nothing of cotrain is in it, but what imports Qwen3.5 without torchvision. The first line that is JSON is what it generates without
speculation, the second with it.
"""

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def generate(model: str, dtype: str, speculation: dict[str, object] | None) -> None:
    from cotrain.engine import cpu

    for patch in (cpu.load_without_torchvision, cpu.inspect_here):
        cpu.apply(patch)
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        model, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=8, speculative_config=speculation,
        enable_prefix_caching=False,  # for linear attention it needs Triton
        disable_log_stats=False, seed=0,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [40 + (7 * i + 3 * j) % 80 for j in range(12)]} for i in range(8)]
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    tokens = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]
    counts = {metric.name: metric for metric in llm.get_metrics()}
    drafts = counts.get("vllm:spec_decode_num_drafts")
    accepted = counts.get("vllm:spec_decode_num_accepted_tokens")
    print(json.dumps({"tokens": tokens, "drafts": drafts and drafts.value, "accepted": accepted and accepted.value}))

    del llm
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    for speculation in (None, json.loads(sys.argv[3])):
        generate(sys.argv[1], sys.argv[2], speculation)
