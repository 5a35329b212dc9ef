"""Checks of an engine: a short training run, `cotrain verify` of its drafter and `cotrain run`, all as a user starts them."""

import re
import shutil
import sys
from pathlib import Path

from cotrain.models.loading import TINY_MODEL, resolve_model
from cotrain.run.provenance import machine
from cotrain.run.rows import read_rows
from drafters.files import read_object, write_json
from pipelines.doctor.machine import output_of

DRAFTER = ["drafter.model.draft_vocab_size=256", "drafter.updates_per_step=2", "drafter.batch_tokens=512"]
DRAFTER += ["drafter.gate.publish_when=always", "tracking.log_drafters=false"]
RUN = f"""
name=run steps=3 policy.model={TINY_MODEL} task.type=reasoning_gym task.name=chain_sum drafter.model.type=eagle3
rollout.prompts_per_step=8 rollout.samples_per_prompt=2 rollout.max_prompt_tokens=256 rollout.max_new_tokens=32
lossless.every=1 rollout.speculation.adaptive=false
""".split()
"""A run of a tiny model that drafts in every step and makes every check that a run makes: features, log-probs, swaps, losslessness,
greedy text."""

HOST = """
import os, sys, time
from cotrain.transport.spool import VARIABLE, Offer, Spool, read_json
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype=sys.argv[2], max_model_len=256, kv_cache_memory_bytes=2**28, enforce_eager=sys.argv[2] == "float32")
prompts = [{"prompt_token_ids": [40 + (7 * i + 3 * j) % 80 for j in range(12)]} for i in range(16)]
greedy, current = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), Spool(os.environ[VARIABLE]).current
texts, started = [], time.monotonic()
while not texts or ((read_json(current, Offer) or Offer()).version < 2 and time.monotonic() - started < 300):
    texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)])
print(sum(map(list.__ne__, texts[0], texts[-1])), "of 16 texts changed")
"""
"""An engine with vLLM's own defaults, on a GPU with model runner V2, generates the same until two drafters are swapped in."""
CONTEXT = """
import sys
from vllm import LLM, SamplingParams

model, dtype, start, end = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
engine = {"max_model_len": end + 64, "max_num_seqs": 1, "kv_cache_memory_bytes": 2**29, "enforce_eager": dtype == "float32"}
llm = LLM(model, dtype=dtype, speculative_config=drafts, disable_log_stats=False, **engine)

def counts():
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [values["vllm:spec_decode_num_" + name] for name in ("drafts", "accepted_tokens")]

lengths, before = [], counts()
for tokens in (start, end):
    prompt = {"prompt_token_ids": [40 + (7 * place) % 83 for place in range(tokens)]}
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), use_tqdm=False)
    after = counts()
    lengths.append(1 + (after[1] - before[1]) / (after[0] - before[0]))
    before = after
print("lengths", *lengths)
"""
"""A policy that is its own drafter accepts nearly all drafts, at the start of its context and at its end."""
SHORT, LONG = 64, {"cpu": 1900, "gpu": 33000}  # tokens before the first draft; many drafters end at 32,768 positions
LEAST_ACCEPTED = 3.0  # of 4 tokens a step

MOST_CHANGED = 4
"""Most texts that drafts may change, since 16-bit batches of another shape can resolve ties differently."""

REMEDIES = {
    "run": "Look up the error in the output, whose place is printed below. NCCL_DEBUG=INFO names links between GPUs that fail, and "
    "VLLM_USE_V2_MODEL_RUNNER=0 takes vLLM's older model runner.",
    "verify": "Do not speculate on this installation: run `cotrain verify`, with VLLM_USE_V2_MODEL_RUNNER=0 too, and report what fails.",
    "context": "Keep rollout.max_prompt_tokens + max_new_tokens below the length that is named, and report this result: drafters fail without "
    "a word in longer contexts here.",
    "sidecar": "Set VLLM_USE_V2_MODEL_RUNNER=0 for every host that the sidecar joins, and report this result.",
}
VERIFY = ("--k", "3", "--batch", "16", "--tokens", "48", "--alpha", "0.001", "--distance", "0.15")


def run(folder: Path, address: str | None) -> str:
    """A short run in this folder goes to its end. address: that of a Ray cluster, on whose nodes it then spreads out."""
    own = [f"run_root={folder}", f"tracking.uri=sqlite:///{folder}/mlflow.db", f"rollout.dtype={_dtype()}"]
    own += [f"cluster.address={address}", "cluster.strategy=SPREAD"] if address else []
    own += ["policy.num_processes=2"] if len(machine()["gpus"]) > 2 else []  # whose gradients NCCL adds up
    output_of("-m", "pipelines.cli", "train", *RUN, *DRAFTER, *own)
    rows = read_rows(folder / "run" / "metrics.jsonl")
    swaps = sum(row.get("drafter/published") or 0 for row in rows)
    tokens = sum(row.get("lossless/speculated_tokens") or 0 for row in rows)
    if not (swaps and tokens):
        counts = f"{swaps:.0f} drafters and checked {tokens:.0f} speculated tokens"
        raise ValueError(f"it swapped in {counts}; both must be above 0")
    return f"{TINY_MODEL} in {_dtype()}, {len(rows)} steps, {swaps:.0f} drafters swapped in"


def verify(folder: Path) -> str:
    """Greedy and sampled text of an engine with the run's last drafter is that of the policy alone."""
    arguments = ("--model", TINY_MODEL, "--drafter", str(max(folder.glob("run/drafters/*"))), "--dtype", _dtype())
    report = folder / "verify" / "verify.json"
    try:
        output_of("-m", "pipelines.cli", "verify", *arguments, *VERIFY, "--out", str(report.parent))
    except ValueError as problem:
        if not report.is_file():
            raise
        raise ValueError(read_object(report)["verdict"]) from problem
    return str(read_object(report)["verdict"])


def context(folder: Path) -> str:
    """Drafts are accepted at the end of a long context as at its start."""
    model, length = folder / "long", LONG["gpu" if machine()["gpus"] else "cpu"]
    shutil.copytree(resolve_model(TINY_MODEL), model)
    config = read_object(model / "config.json")
    write_json(model / "config.json", config | {"max_position_embeddings": length + 64})
    output = output_of("-c", CONTEXT, str(model), _dtype(), str(SHORT), str(length))
    first, last = map(float, re.findall(r"^lengths (\S+) (\S+)$", output, re.MULTILINE)[0])
    found = f"{first:.2f} tokens a step after {SHORT} tokens of context, {last:.2f} after {length}, of 4"
    if min(first, last) < LEAST_ACCEPTED:
        raise ValueError(found)
    return found


def sidecar(folder: Path) -> str:
    """`cotrain run` trains a drafter beside an engine with vLLM's own defaults, whose greedy text stays the same."""
    own = [f"run_root={folder}", f"spool={folder}/spool", f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    # This host leaves no pause in which a trainer of low priority would work.
    own += ["name=sidecar", "adaptive=false", "nice=0"]
    host = [sys.executable, "-c", HOST, str(resolve_model(TINY_MODEL)), _dtype()]
    output = output_of("-m", "pipelines.cli", "run", "--model", TINY_MODEL, *DRAFTER, *own, "--", *host)
    swaps = sum(row.get("drafter/published") or 0 for row in read_rows(folder / "sidecar" / "metrics.jsonl"))
    changed = re.search(r"^(\d+) of 16 texts changed$", output, re.MULTILINE)
    engines = re.search(r"^ *engines +(.*)", output, re.MULTILINE)
    if not (swaps and engines and changed and int(changed[1]) <= MOST_CHANGED):
        raise ValueError(
            f"{swaps:.0f} drafters swapped in, {changed and changed[0]}; engines: {engines and engines[1]}"
        )
    return f"{engines[1]}, {swaps:.0f} drafters swapped in, {changed[0]}"


def _dtype() -> str:
    return "bfloat16" if machine()["gpus"] else "float32"  # FlashAttention takes no float32
