"""`cotrain doctor`: what works on this machine or cluster, before a run is started on it.

Exit status: 0 when nothing has failed, 1 otherwise.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from cotrain.config.schema import default_run_root
from cotrain.process.children import engine_output_to
from cotrain.process.stopping import stop_at_once
from cotrain.run.console import Console, duration
from cotrain.run.provenance import here_and_now
from pipelines.doctor import engine, machine
from pipelines.doctor.check import Check, run_check

DESCRIPTION = """\
Check this machine before a run is started on it; then make a short run of a tiny model, here or on a Ray cluster, and verify
its drafter. It takes a few minutes and leaves nothing behind. A failure comes with a remedy; "not applicable" says
that the machine lacks what would be checked, or that what the check needs did not start."""

SETUP = "Run `make clean` and then `make setup`, which installs the versions that pyproject.toml names."
MACHINE = {
    "python": "Make the environment anew with a supported version: make setup PYTHON=/path/to/python.",
    "torch": SETUP,
    "vllm": SETUP,
    "openmp": "Run `make setup` again, which installs intel-openmp beside vLLM's CPU build.",
    "shared-memory": "Start the container with --shm-size=8g or --ipc=host, or enlarge /dev/shm.",
    "disk": "Make room, start runs in a folder on a larger disk, or set COTRAIN_CACHE to one.",
    "gpus": "Install a driver for torch's version of CUDA, and look at CUDA_VISIBLE_DEVICES.",
    "nccl": "Run `NCCL_DEBUG=INFO cotrain doctor --only nccl` and look for the link that fails.",
    "hooks": "Install the vLLM that pyproject.toml pins, or adapt cotrain/engine/ to this one.",
    "model-runner-v2": "Set VLLM_USE_V2_MODEL_RUNNER=0 for every host that the sidecar joins, and report what was found.",
}
"""Checks of this machine in their order, and what to do when one fails. ENGINE has the same form."""
ENGINE = {
    "run": "Look up the error in the output, whose place is printed below the table.",
    "verify": "Do not speculate on this installation: run `cotrain verify`, and report the settings that fail.",
}


def main(argv: Sequence[str]) -> int:
    """Run the command: print progress, then the table or JSON. Raises OSError when the JSON file cannot be written."""
    parser = argparse.ArgumentParser(prog="cotrain doctor", description=DESCRIPTION)
    parser.add_argument("--json", metavar="FILE", help="write the result there too; - prints it instead of the table")
    parser.add_argument("--address", help="Ray cluster of the short run, or auto (default: a private Ray here)")
    names = [*MACHINE, *ENGINE]
    listed = f"these checks alone, of {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=listed)
    options = parser.parse_args(argv)
    root = default_run_root().absolute() if options.address else Path(tempfile.gettempdir())  # which its nodes share
    root.mkdir(parents=True, exist_ok=True)
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="cotrain-doctor-", dir=root))
    with os.fdopen(os.dup(2 if options.json == "-" else 1), "w", buffering=1) as stream:
        # Libraries print to standard output, which has to stay clean.
        doctor = Doctor(options.only, stream)
        try:
            with stop_at_once(), engine_output_to(folder / "engine.log"):
                doctor.make_all(folder, options.address)
        except BaseException:  # it was stopped
            shutil.rmtree(folder, ignore_errors=True)
            raise
        failed = [check.name for check in doctor.checks if check.status == "fail"]
        if options.json != "-":
            print_table(doctor.checks, stream)
        verdict = f"failed: {', '.join(failed)}" if failed else "nothing failed"
        print(f"{len(doctor.checks)} checks in {duration(time.monotonic() - started)}, {verdict}", file=stream)
        if failed:
            print(f"output of what has failed, and of libraries: {folder}/engine.log", file=stream)
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

    def make_all(self, folder: Path, address: str | None) -> None:
        """Make the wanted checks. folder: for the run. address: that of its Ray cluster, or None for a private one."""
        functions = {name: getattr(machine, name.replace("-", "_")) for name in MACHINE}
        functions |= {"run": partial(engine.run, folder, address), "verify": partial(engine.verify, folder)}
        for name, remedy in (MACHINE | ENGINE).items():
            if name in self._wanted or (name == "run" and "verify" in self._wanted):  # the drafter is that of the run
                self._make(name, functions[name], remedy)

    def _make(self, name: str, function: Callable[[], str], remedy: str) -> None:
        with self._console.phase(name, terminal_only=True):
            check = run_check(name, function, remedy)
        self.checks.append(check)
        self._console.say(f"{check.status:14}  {name}, {check.seconds}s")
