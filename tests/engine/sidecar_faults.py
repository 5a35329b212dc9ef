"""Engines of a host in one process, with an error planted in a hook of the sidecar: sidecar_faults.py MODEL FAULTS.

FAULTS is JSON, lists of names of functions by when they are called: "configure" where an engine is adopted, "start" where
it is made, each of which gets an engine, and "run" in its steps, which share the engine without a fault.
Prints a line of JSON for each fault. The first engine has no sidecar, the second one no fault.
"""

import gc
import json
import os
import sys
from typing import Any
from unittest.mock import patch

VARIABLE = "COTRAIN_SIDECAR"
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 2**28, "seed": 0,
    "disable_log_stats": False,
}  # fmt: skip
WAVES = 2


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


def start(model: str) -> Any:
    from vllm import LLM

    return LLM(model, **OPTIONS)


def generate(llm: Any, waves: int = WAVES) -> dict[str, Any]:
    """What an engine generates, and how many draft tokens there were after each wave."""
    from vllm import SamplingParams

    prompts: Any = [{"prompt_token_ids": [40 + (7 * i + 3 * j) % 80 for j in range(12)]} for i in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    drawn = SamplingParams(temperature=1, top_k=20, top_p=0.9, max_tokens=8, ignore_eos=True, detokenize=False)
    found: dict[str, Any] = {"tokens": [], "num_drawn": 0, "drafted": []}
    before = drafted(llm)
    for _ in range(waves):
        found["tokens"] += [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy, use_tqdm=False)]
        found["num_drawn"] += sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, drawn, use_tqdm=False))
        found["drafted"].append(drafted(llm) - before)
    found["has_drafter"] = llm.llm_engine.vllm_config.speculative_config is not None
    return found


def drafted(llm: Any) -> int:
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return int(counts.get("vllm:spec_decode_num_draft_tokens", 0))


def start_over(llm: Any) -> None:
    """Let the sidecar of a running engine be as it is at the start: nothing has failed, and nothing is tapped."""
    llm.llm_engine.engine_core.engine_core.scheduler.cotrain_start()
    sidecar = sidecar_of(llm)
    sidecar._breaker.failures.clear()
    sidecar._live.clear()
    sidecar._shards._waiting.clear()


def sidecar_of(llm: Any) -> Any:
    """The sidecar of an engine's worker."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.execute_model.cotrain_hook.__self__


def tell(fault: str, **found: Any) -> None:
    print(json.dumps({"fault": fault} | found), flush=True)


def an_engine(model: str, fault: str) -> None:
    """Tell what an engine generates in which this function was broken when it started."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with patch(fault, broken):
        llm = start(model)
        tell(fault, **generate(llm))
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def main(model: str, faults: dict[str, list[str]]) -> None:
    folder = os.environ.pop(VARIABLE)
    from vllm import EngineArgs
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from cotrain.engine.host import plugin

    def configured() -> list[Any]:
        """What of an engine's configuration the sidecar changes."""
        config = EngineArgs(model, **OPTIONS).create_engine_config()
        scheduler, parallel = config.scheduler_config, config.parallel_config
        classes = scheduler.scheduler_cls, parallel.worker_cls, parallel.worker_extension_cls
        return [config.speculative_config is not None, scheduler.async_scheduling, *map(str, classes)]

    llm = start(model)
    tell("no sidecar", **generate(llm), configured=configured())
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    os.environ[VARIABLE] = folder
    plugin.register()  # vLLM has loaded its plugins when the variable was not set
    for fault in faults["configure"]:
        with patch(fault, broken):
            tell(fault, configured=configured())
    llm = start(model)
    tell("none", **generate(llm))
    for fault in faults["run"]:
        start_over(llm)
        before = generate(llm, waves=1)["drafted"][0]
        with patch(fault, broken):
            tell(fault, **generate(llm), before=before)
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    for fault in faults["start"]:
        an_engine(model, fault)
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("cotrain", "drafters")]
    tell("modules", files=sorted(sys.modules[name].__file__ or "" for name in loaded))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
