"""Checks of an engine: a short training run and `cotrain verify` of its drafter, both as a user starts them."""

from pathlib import Path

from cotrain.models.loading import TINY_MODEL
from cotrain.run.mlflow_store import sqlite_uri
from cotrain.run.provenance import machine
from cotrain.run.rows import read_rows
from drafters.files import read_object
from pipelines.doctor.machine import NotApplicable, Problem, output_of

RUN = f"""
name=run steps=3 policy.model={TINY_MODEL} task.type=reasoning_gym task.name=chain_sum tracking.log_drafters=false
rollout.prompts_per_step=8 rollout.samples_per_prompt=2 rollout.max_prompt_tokens=256 rollout.max_new_tokens=32
drafter.model.type=eagle3 drafter.model.draft_vocab_size=256 drafter.updates_per_step=2 drafter.batch_tokens=512
drafter.gate.publish_when=always lossless.every=1 rollout.speculation.adaptive=false
""".split()
"""A run of a tiny model that drafts in every step and makes every check that a run makes: features, log-probs, swaps, losslessness,
greedy text."""

REMEDIES = {
    "run": "Look up the error in the output, whose place is printed below. NCCL_DEBUG=INFO names links between GPUs that fail.",
    "verify": "Do not speculate on this installation: run `cotrain verify`, and report the settings that fail.",
}
VERIFY = ("--k", "3", "--batch", "16", "--tokens", "48", "--alpha", "0.001", "--distance", "0.15")


def run(folder: Path, address: str | None) -> str:
    """A short run in this folder goes to its end. address: that of a Ray cluster, on whose nodes it then spreads out."""
    own = [f"run_root={folder}", f"tracking.uri={sqlite_uri(folder / 'mlflow.db')}", f"rollout.dtype={_dtype()}"]
    own += [f"cluster.address={address}", "cluster.strategy=SPREAD"] if address else []
    own += ["policy.num_processes=2"] if len(machine()["gpus"]) > 2 else []  # whose gradients NCCL adds up
    output_of("-m", "pipelines.cli", "train", *RUN, *own)
    rows = read_rows(folder / "run" / "metrics.jsonl")
    swaps = sum(row.get("drafter/published") or 0 for row in rows)
    tokens = sum(row.get("lossless/speculated_tokens") or 0 for row in rows)
    if not (swaps and tokens):
        raise Problem(
            f"it swapped in {swaps:.0f} drafters and checked {tokens:.0f} speculated tokens; both must be above 0"
        )
    return f"{TINY_MODEL} in {_dtype()}, {len(rows)} steps, {swaps:.0f} drafters swapped in"


def verify(folder: Path) -> str:
    """Greedy and sampled text of an engine with the run's last drafter is that of the policy alone."""
    if not (drafters := sorted(folder.glob("run/drafters/*"))):
        raise NotApplicable('"run" has failed')
    arguments = ("--model", TINY_MODEL, "--drafter", str(drafters[-1]), "--dtype", _dtype())
    report = folder / "verify" / "verify.json"
    try:
        output_of("-m", "pipelines.cli", "verify", *arguments, *VERIFY, "--out", str(report.parent))
    except Problem as problem:
        if not report.is_file():
            raise
        raise Problem(read_object(report)["verdict"]) from problem
    return str(read_object(report)["verdict"])


def _dtype() -> str:
    return "bfloat16" if machine()["gpus"] else "float32"  # FlashAttention takes no float32
