"""Engines of a host in one process, with an error planted in a hook of the sidecar in each: sidecar_faults.py MODEL FAULT ...

Prints a line of JSON for each engine. The first has no sidecar, the second one without a fault.
"""

import gc
import json
import os
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

VARIABLE = "COTRAIN_SIDECAR"
WAVES = 2


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


def generate(model: str) -> dict[str, Any]:
    """What an engine generates, and what of it was drafted."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
        seed=0,
        disable_log_stats=False,
    )
    prompts: Any = [{"prompt_token_ids": [40 + (7 * i + 3 * j) % 80 for j in range(12)]} for i in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    drawn = SamplingParams(temperature=1, top_k=20, top_p=0.9, max_tokens=8, ignore_eos=True, detokenize=False)
    found: dict[str, Any] = {"tokens": [], "num_drawn": 0, "drafted": []}
    for _ in range(WAVES):
        found["tokens"] += [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy, use_tqdm=False)]
        found["num_drawn"] += sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, drawn, use_tqdm=False))
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        found["drafted"].append(counts.get("vllm:spec_decode_num_draft_tokens", 0))
    found["has_drafter"] = llm.llm_engine.vllm_config.speculative_config is not None
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return found


def main(model: str, faults: list[str]) -> None:
    folder = os.environ.pop(VARIABLE)
    from cotrain.sidecar import plugin

    print(json.dumps({"fault": "no sidecar"} | generate(model)), flush=True)
    os.environ[VARIABLE] = folder
    plugin.register()  # vLLM has loaded its plugins when the variable was not set
    for fault in ["none", *faults]:
        with ExitStack() as stack:
            if fault != "none":
                stack.enter_context(patch(fault, broken))
            print(json.dumps({"fault": fault} | generate(model)), flush=True)
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("cotrain", "drafters")]
    print(
        json.dumps({"fault": "modules", "files": sorted(sys.modules[name].__file__ or "" for name in loaded)}),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
