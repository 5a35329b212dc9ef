"""`cotrain doctor`: what works on this machine or cluster, before a run is started on it.

Exit status: 0 when nothing has failed, 1 otherwise.
"""

import argparse
import asyncio
import json
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from cotrain.process.children import engine_output_to
from cotrain.process.stopping import stop_at_once
from cotrain.run.console import Console, duration
from cotrain.run.provenance import here_and_now
from pipelines.doctor import machine
from pipelines.doctor.check import Check, NotApplicable, run_check

DESCRIPTION = """\
Check this machine, and the Ray cluster that it belongs to, before a run is started on it; then a vLLM engine with a tiny
model on this machine. It takes a few minutes and leaves nothing behind. A failure comes with a remedy; "not applicable" says
that the machine lacks what would be checked, or that what the check needs did not start."""

SETUP = "Run `make clean` and then `make setup`, which installs the versions that pyproject.toml names."
UNSAFE = "Do not train on this installation: run `make setup` again, and report what was found if it stays."
LOSSY = "Do not speculate on this installation: run `cotrain verify`, and report the settings that fail."

MACHINE = {
    "python": "Make the environment anew with a supported version: make setup PYTHON=/path/to/python.",
    "torch": SETUP,
    "vllm": SETUP,
    "openmp": "Run `make setup` again, which installs intel-openmp beside vLLM's CPU build.",
    "shared-memory": "Start the container with --shm-size=8g or --ipc=host, or enlarge /dev/shm.",
    "disk": "Make room, start runs in a folder on a larger disk, or set COTRAIN_CACHE to one.",
    "gpus": "Install a driver for torch's version of CUDA, and look at CUDA_VISIBLE_DEVICES.",
    "nccl": "Run `NCCL_DEBUG=INFO cotrain doctor --only nccl` and look for the link that fails.",
    "hooks": "Install the vLLM that pyproject.toml pins, or adapt cotrain/rollout/vllm/ to this one.",
    "model-runner-v2": "Set VLLM_USE_V2_MODEL_RUNNER=0 for every host that the sidecar joins, and report what was found.",
}
"""Checks of this machine in their order, and what to do when one fails. NODES and ENGINE have the same form."""
NODES = {
    "ray": "Give --address of a running cluster, or leave it out to start a private Ray on this machine.",
    "nodes": "Install the same versions on every node, and start Ray there from that environment.",
    "ports": "Open the TCP ports between the nodes, at least those of net.ipv4.ip_local_port_range.",
}
ENGINE = {
    "engine": "Read the engine's output, whose place is printed below the table.",
    "tap": UNSAFE,
    "drafter-swap": UNSAFE,
    "read-back": UNSAFE,
    "bad-update": UNSAFE,
    "draft-length": UNSAFE,
    "greedy": LOSSY,
    "verify": LOSSY,
    "cuda-graphs": "Leave enforce_eager, compilation_config and capture sizes out of rollout.vllm.",
    "step-time": "Repeat the check while the machine is idle; on a GPU see to cuda-graphs first.",
}
"""The first check starts what all others then check; the same holds for NODES."""


def main(argv: Sequence[str]) -> int:
    """Run the command: print progress, then the table or JSON. Raises OSError when the JSON file cannot be written."""
    parser = argparse.ArgumentParser(prog="cotrain doctor", description=DESCRIPTION)
    parser.add_argument("--json", metavar="FILE", help="write the result there too; - prints it instead of the table")
    parser.add_argument("--address", help="of a running Ray cluster, or auto (default: a private Ray on this machine)")
    names = [*MACHINE, *NODES, *ENGINE]
    listed = f"these checks alone, of {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=listed)
    options = parser.parse_args(argv)
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="cotrain-doctor-"))
    with os.fdopen(os.dup(2 if options.json == "-" else 1), "w", buffering=1) as stream:
        # Libraries print to standard output, which has to stay clean.
        with stop_at_once(), engine_output_to(folder / "engine.log"):
            doctor = Doctor(options.only, stream)
            asyncio.run(doctor.make_all(options.address))
        failed = [check.name for check in doctor.checks if check.status == "fail"]
        if options.json != "-":
            print_table(doctor.checks, stream)
        verdict = f"failed: {', '.join(failed)}" if failed else "nothing failed"
        print(f"{len(doctor.checks)} checks in {duration(time.monotonic() - started)}, {verdict}", file=stream)
        if failed:
            print(f"output of the engine and of libraries: {folder}/engine.log", file=stream)
        else:
            shutil.rmtree(folder)
    if options.json:
        checks = [asdict(check) for check in doctor.checks]
        report = here_and_now() | {"passed": not failed, "checks": checks}
        with nullcontext(sys.stdout) if options.json == "-" else open(options.json, "w") as file:
            print(json.dumps(report, indent=1), file=file)
    return 1 if failed else 0


def print_table(checks: Iterable[Check], stream: TextIO) -> None:
    """Print one row for each check, with the remedy below what was found."""
    table = Table("check", "status", "found", box=SIMPLE_HEAD, pad_edge=False)
    for check in checks:
        table.add_row(check.name, check.status, "\n".join(filter(None, (check.found, check.remedy))))
    width = None if stream.isatty() else 120
    RichConsole(file=stream, highlight=False, markup=False, width=width).print(table)


class Doctor:
    """Makes the checks that are wanted, and reports the result of each."""

    def __init__(self, wanted: Collection[str], stream: TextIO):
        self.checks: list[Check] = []
        self._wanted, self._console = wanted, Console(stream)

    async def make_all(self, address: str | None) -> None:
        """Make the wanted checks. address: that of a Ray cluster, or None to start a private one."""
        for name, remedy in MACHINE.items():
            if name in self._wanted:
                await self._make(name, getattr(machine, identifier(name)), remedy)
        await self._make_of(NODES, "pipelines.doctor.nodes:ray_nodes", address)
        await self._make_of(ENGINE, "pipelines.doctor.engine:started_engine")

    async def _make_of(self, remedies: dict[str, str], context: str, *args: Any) -> None:
        """Make the checks of something that the first of them starts. context: "module:name" of its async context manager."""
        (first, first_remedy), *others = remedies.items()
        if remedies.keys().isdisjoint(self._wanted):
            return
        owner: Any = None

        def not_started() -> None:
            raise NotApplicable(f'"{first}" has failed')

        async with AsyncExitStack() as stack:

            async def start() -> str:
                nonlocal owner
                owner = await stack.enter_async_context(pkgutil.resolve_name(context)(*args))
                return str(owner.about)

            await self._make(first, start, first_remedy)
            for name, remedy in others:
                if name in self._wanted:
                    await self._make(name, getattr(owner, identifier(name)) if owner else not_started, remedy)

    async def _make(self, name: str, function: Callable[[], Any], remedy: str) -> None:
        with self._console.phase(name, terminal_only=True):
            check = await run_check(name, function, remedy)
        self.checks.append(check)
        self._console.say(f"{check.status:14}  {name}, {check.seconds}s")


def identifier(name: str) -> str:
    """Return the name of the function or method that makes the check of this name."""
    return name.replace("-", "_")
