"""What `cotrain bench --synthetic` adds: an engine at real sizes without weights, and its tap, swaps and memory (docs/start/gpu.md).

The policy is vLLM's dummy of a described shape, the drafter has random weights, and vLLM accepts drafts at given rates, whatever
they are. So times are those of a real model, and no text means anything.
"""

import argparse
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from transformers import LlamaConfig

from cotrain.config.errors import did_you_mean
from cotrain.config.load import Table
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.models.capability import refusal
from cotrain.records import RolloutRequest
from cotrain.run.provenance import machine
from cotrain.simulation.roofline import entries
from cotrain.weights.payload import write_payload, write_tensors
from drafters.base import Drafter, TargetSpec
from drafters.build import DRAFTERS, build_drafter
from drafters.config import BLOCK_DRAFTERS, DrafterModelConfig
from drafters.files import CONFIG, WEIGHTS, read_object, write_json
from pipelines.engines import EngineSetup, rollout_config
from pipelines.plan import BYTES, GIB, policy_on_meta

PREFILL_TOKENS = 16_384  # most prompt tokens of a step; the prompts of larger batches take several
SHARE = 0.9  # share of a GPU's memory for all engines together, and of shared memory for a policy's file
REPEATS = 3  # calls with the tap, calls without it, and swaps of the drafter, of which the median counts


def described(given: str) -> tuple[str, dict[str, Any]]:
    """Return name and config.json of what --synthetic gives. Raises ValueError naming the fix."""
    path, shapes = Path(given).expanduser(), {name.lower(): name for name in entries("models")}
    short = given.rpartition("/")[2].lower()
    if path.exists():
        file = (path / CONFIG if path.is_dir() else path).resolve()
        name, config = file.parent.name, read_object(file, "a Hugging Face model")
    elif short in shapes:
        name, m = shapes[short], entries("models")[shapes[short]]
        # What the simulator's models leave open, such as biases and norms of queries and keys, takes next to no time.
        shape = LlamaConfig(
            num_hidden_layers=m.layers, hidden_size=m.hidden, num_attention_heads=m.heads, head_dim=m.head_dim,
            num_key_value_heads=m.kv_heads, intermediate_size=m.intermediate, vocab_size=m.vocabulary,
            max_position_embeddings=131_072, architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        config = shape.to_dict()
        config |= {"architectures": ["one with experts"]} if m.experts > 1 else {}
    else:
        fix = f"give a config.json, the folder of one, or {', '.join(shapes)}{did_you_mean(short, list(shapes))}"
        raise ValueError(f"--synthetic: {given!r} is no file here and no known shape; {fix}")
    if reason := "it is quantized" if config.get("quantization_config") else refusal(config):
        raise ValueError(f"--synthetic: {given} cannot be trained: {reason}; give another one")
    return name, config


def random_drafter(kind: str, target: TargetSpec, depth: int, seed: int) -> Drafter:
    """Build a drafter of the simulator's shape, see Model.drafter. Raises ValueError where it does not fit the target."""
    if kind not in DRAFTERS:
        raise ValueError(f"--drafter: {kind!r} is no kind with random weights; give {', '.join(DRAFTERS)} or none")
    fields: Table = {"type": kind, "trained_depth": depth}
    fields |= {"draft_vocab_size": min(32_000, target.vocab_size)} if kind == "eagle3" else {}
    if kind in BLOCK_DRAFTERS:  # there is no tokenizer to say which token text never has, and no text that matters
        mask = next(token for token in reversed(range(target.vocab_size)) if token not in target.eos_token_ids)
        fields |= {"num_layers": 5, "draft_vocab_size": target.vocab_size, "mask_token_id": mask}
    try:
        return build_drafter(TypeAdapter(DrafterModelConfig).validate_python(fields), target, seed)
    except ValueError as error:
        raise ValueError(f"--drafter: {kind} does not fit this shape: {error}") from error


def check_synthetic(options: argparse.Namespace) -> None:
    """Check the options that --synthetic changes, and fill in its defaults. Raises ValueError naming the option and the fix."""
    if found := [name for name in ("prompts", "stop_at_eos", "drain") if getattr(options, name)]:
        raise ValueError(f"--{found[0].replace('_', '-')}: prompts are random, and no text ends; leave it out")
    if any(method.endswith("suffix") for method in options.methods or ()):
        raise ValueError("--methods: random text repeats nothing that a history could draft; leave that out")
    if not 0 <= options.accept <= 1:
        raise ValueError(f"--accept: {options.accept} is no share; give 0 to 1")
    options.drafter = {None: "eagle3", "none": None}.get(options.drafter, options.drafter)
    drawn = "probabilistic" if options.temperature else "greedy"
    options.methods = options.methods or ["none" if options.drafter is None else drawn]


def synthetic_setup(
    options: argparse.Namespace, num_prompts: int, batch: int, folder: Path, num_engines: int, **rollout: Any
) -> EngineSetup:
    """Do what `prepare_engine` does, for --synthetic. num_engines: those that run at once. Raises ValueError naming option and fix."""
    name, config = described(options.synthetic)
    policy, saved, gpus, most = folder / "policy", folder / "drafter", machine()["gpus"], max(options.k)
    policy.mkdir(parents=True)
    write_json(policy / CONFIG, config)
    target, options.model = TargetSpec.from_pretrained(policy), name
    settings = rollout_config(options, policy, options.context, batch, **rollout)
    vllm = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_batched_tokens": max(PREFILL_TOKENS, batch)}
    settings = settings.model_copy(update={"vllm": settings.vllm | vllm})
    weights = BYTES[options.dtype] * policy_on_meta(policy).num_parameters() / settings.tensor_parallel_size
    needed = num_engines * (weights + settings.vllm["kv_cache_memory_bytes"]) / GIB
    there = float(gpus[0].split(",")[1].split()[0]) / 1024 if gpus else machine()["memory_gib"]
    if needed > SHARE * there:
        said = f"{num_engines} engines with {batch} requests take {needed:.1f} GiB, above {SHARE:.0%} of {there:.1f}"
        raise ValueError(f"--batch: {said}; lower it, --context or --tokens, or raise --tensor-parallel-size")
    prompts = np.random.default_rng(options.seed).integers(target.vocab_size, size=(num_prompts, options.context))
    drafter = None if options.drafter is None else random_drafter(options.drafter, target, most, options.seed)
    if drafter is not None:
        drafter.save(saved, getattr(torch, options.dtype))
    rates = tuple(options.accept**position for position in range(1, most + 1))
    return EngineSetup(policy, prompts.tolist(), settings, drafter, saved if drafter else None, rates)


async def beside(setup: EngineSetup, running: dict[str, RolloutEngine], requests: list[RolloutRequest]) -> list[str]:
    """Measure tap, swaps and memory. Returns a line on each, and one on the rates."""
    lines, engine, dtype = list[str](), running.get("drafter"), getattr(torch, setup.rollout.dtype)
    if engine is not None and setup.drafter is not None:
        lengths = (f"{n:.2f} for k={k}" for k, n in enumerate(np.cumsum(setup.synthetic_rates) + 1, 1))
        lines += [f"acceptance is set, to lengths of {', '.join(lengths)}", await _tap(engine, requests)]
        state, times = setup.drafter.state_for_serving(), list[float]()
        for number in range(REPEATS):
            payload = write_payload(state, Path(engine.spec.scratch, f"drafter_{number}.safetensors"), dtype)
            times.append((await engine.update_drafter(payload, number + 1)).seconds)
        lines.append(f"swap of the drafter, {payload.num_bytes / 2**20:.1f} MiB by file: {median(times):.3f} s")
    lines.append(await _swap_policy(engine or running["stock"], setup.model, dtype))
    for name, each in running.items():
        host, gpu = await each.on_workers(EngineWorker.peak_memory)
        lines.append(f"most memory of a rank of {name}: {host / GIB:.2f} GiB of the host, {gpu / GIB:.2f} of its GPU")
    return lines


async def _tap(engine: RolloutEngine, requests: list[RolloutRequest]) -> str:
    """Time steps in which all requests decode at the largest draft length, with the tap and without it."""
    await engine.set_num_speculative_tokens(engine.spec.rollout.num_speculative_tokens)
    times: dict[bool, list[float]] = {True: [], False: []}
    for tap in (True, False) * REPEATS:
        await engine.take_window()
        stats = (await engine.generate(requests, tap=tap)).feature_stats
        steps = (await engine.take_window()).steps
        whole = [step for step in steps if step.batch == len(requests) and step.kind == "steady"]
        times[tap].append(1e3 * sum(step.seconds for step in whole) / max(1, sum(step.num_steps for step in whole)))
        if tap:
            hook, kept = 1e3 * stats["record_seconds"] / sum(step.num_steps for step in steps), stats
    of = f"tap, {kept['num_rollouts']:.0f} of {len(requests)} requests, {kept['num_bytes'] / 2**20:.1f} MiB"
    each = f"a step takes {median(times[True]):.2f} ms with it and {median(times[False]):.2f} without"
    return f"{of}: {each}, {hook:.3f} of them in the hook"


async def _swap_policy(engine: RolloutEngine, folder: Path, dtype: torch.dtype) -> str:
    """Send random weights to an engine by file, if shared memory holds them."""
    model = policy_on_meta(folder)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    size = sum(shape.numel() for shape in sizes.values()) * dtype.itemsize
    said = f"swap of the policy, {size / GIB:.2f} GiB by file"
    if size > SHARE * shutil.disk_usage(engine.spec.scratch).free:
        return f"{said}: not measured, since shared memory does not hold it"
    began, block = time.monotonic(), torch.randn(2**20).mul(0.02).to(dtype)
    tensors = ((n, block.repeat(-(-s.numel() // len(block)))[: s.numel()].view(s)) for n, s in sizes.items())
    layout = {name: (tuple(shape), dtype) for name, shape in sizes.items()}
    payload = write_tensors(layout, tensors, Path(engine.spec.scratch, "policy.safetensors"))
    (folder / WEIGHTS).symlink_to(payload.path)  # an update has the names that are in the folder of the engine's model
    written = time.monotonic() - began
    swap = await engine.update_policy(payload, engine.versions.policy + 1)
    return f"{said}: {swap.seconds:.2f} s, and {written:.2f} before that to write it"
