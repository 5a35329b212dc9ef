"""An engine with vLLM's model runner V2, adopted as the sidecar adopts a host's: python -m pipelines.doctor.adopted FOLDER."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from cotrain.engine.host import plugin
from cotrain.models.loading import TINY_MODEL, resolve_model
from cotrain.transport.spool import VARIABLE, Offer, Settings, Spool, State, read_json, write_json
from cotrain.weights.payload import write_payload
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def check(folder: Path, dtype: str, most_changed: int, tokens: int, **arguments: Any) -> str:
    """Generate without drafts, then with a drafter that always proposes the same token. Raises ValueError saying what is wrong.

    most_changed: most texts that drafts may change, since 16-bit batches of another shape can resolve ties differently.
    """
    model, spool, number_type = resolve_model(TINY_MODEL), Spool(folder / "spool"), getattr(torch, dtype)
    spool.hold()
    drafter = build_drafter(Eagle3Config(type="eagle3", draft_vocab_size=32), TargetSpec.from_pretrained(model), seed=0)
    drafter.save(spool.initial, number_type)
    kind = {"method": drafter.serving.method, "draft_sample_method": "probabilistic"}
    drafting = kind | {"model": str(spool.initial), "num_speculative_tokens": 3}
    spool.create(Settings(TINY_MODEL, str(model), drafting, drafter.serving.aux_layers, 1.0, 2**24, False))
    write_json(spool.current, Offer(on=False))
    os.environ |= V2 | {VARIABLE: str(spool.folder)}
    plugin.register()
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype=dtype, max_model_len=256, seed=0, disable_log_stats=False, **arguments)
    prompts: Any = [{"prompt_token_ids": [40 + (7 * i + 3 * j) % 80 for j in range(12)]} for i in range(16)]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    plain = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]
    states = [read_json(engine.state, State) for engine in spool.engines()]
    if not states or states[0] is None or states[0].reason is not None:
        raise ValueError(states[0].reason if states and states[0] else "the engine was not adopted")
    state, ((token, _),) = drafter.state_for_serving(), Counter(t for text in plain for t in text[1:]).most_common(1)
    state |= {"norm.weight": torch.zeros_like(state["norm.weight"]), "d2t": torch.full_like(state["d2t"], token)}
    payload = write_payload(state, spool.current.with_name("1.safetensors"), number_type)
    write_json(spool.current, Offer(1, path=payload.path, digests=payload.digests))
    texts = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]
    counts = {metric.name: int(getattr(metric, "value", 0)) for metric in llm.get_metrics()}
    steps, accepted = (counts.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
    changed, shards = sum(map(list.__ne__, texts, plain)), len(spool.engines()[0].shards())
    found = f"{changed} of {len(texts)} texts changed, {1 + accepted / max(1, steps):.2f} tokens a step"
    if changed > most_changed or not accepted or not shards:
        raise ValueError(f"{found}, {shards} shards of hidden states")
    return f"vLLM {states[0].vllm}, {found}"


if __name__ == "__main__":
    print(check(Path(sys.argv[1]), "bfloat16", 4, 48, gpu_memory_utilization=0.3))
