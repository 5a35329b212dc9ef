"""Refuses vLLM settings that are known to make speculation lossy: lossy_settings.toml has them, with the reason and the fix.

Speculation is lossless when every emitted token is drawn from the distribution that the policy alone would have given
it. A setting that is not listed here is judged by its effect: by `cotrain verify` before a run, by the monitor
(cotrain/lossless/monitor.py) during one. Imports no torch and no vLLM.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SETTINGS = tomllib.loads(Path(__file__).with_name("lossy_settings.toml").read_text(encoding="utf-8"))["refused"]
REFUSED: dict[str, str] = {name: group["reason"] for group in SETTINGS for name in group["names"]}
"""The reason and the fix for each engine argument and environment variable that is refused."""

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable: 1 for its model runner V2, 0 for V1. Without it, vLLM takes V2 where that can run."""

OWNED = frozenset(name for name in REFUSED if "is set by cotrain" in REFUSED[name])
ALWAYS_REFUSED = OWNED | {name for name, why in REFUSED.items() if "divides" in why or "sequence parallelism" in why}
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


def model_runner_problems(
    environment: Mapping[str, str], on_cpu: bool, has_history: bool, drafter: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (name, value with reason and fix) if an engine would not get the model runner that it needs. drafter: its type, if any."""
    value = environment.get(MODEL_RUNNER, "0")
    if drafter == "dspark" and has_history:
        yield (
            "rollout.history",
            'only V1 drafts from one, and only V2 with drafter.model.type = "dspark"; leave one out',
        )
    elif drafter == "dspark" and environment.get(MODEL_RUNNER) == "0":
        yield MODEL_RUNNER, "'0': only V2 drafts with drafter.model.type = \"dspark\"; unset it, or take another type"
    if value != "0" and has_history:
        yield MODEL_RUNNER, f"{value!r}: only V1 drafts from a history; unset it, or leave out rollout.history"
    if value != "0" and on_cpu and "TRITON_INTERPRET" not in environment:
        yield MODEL_RUNNER, f"{value!r}: vLLM's CPU build has no Triton for V2 to compile its kernels with; unset it"
