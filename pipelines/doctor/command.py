"""`cotrain doctor`: what works on this machine or cluster, before a run. Exit status 1 when something has failed."""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from cotrain.config.schema import default_run_root
from cotrain.process.children import engine_output_to
from cotrain.process.stopping import stop_at_once
from cotrain.run.console import Console, duration
from cotrain.run.provenance import here_and_now
from drafters.files import write_json
from pipelines.doctor import engine
from pipelines.doctor.machine import MACHINE
from pipelines.help import CommandParser


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["pass", "fail"]
    found: str
    remedy: str  # what to do about a failure, in a sentence; empty for all others

    def __str__(self) -> str:
        line = f"{self.name:8}  {self.status}  {self.found}"
        return f"{line}\n{'':16}{self.remedy}" if self.remedy else line


def main(argv: Sequence[str]) -> int:
    """Run the command, which prints each result as it comes. Raises OSError when the JSON file cannot be written."""
    parser = CommandParser("doctor")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result there too")
    parser.add_argument("--address", help="Ray cluster of the short run, or auto (default: a private Ray here)")
    names = [*MACHINE, *engine.REMEDIES]
    listed = f"these checks alone, of {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=listed)
    options = parser.parse_args(argv)
    root = default_run_root().absolute() if options.address else Path(tempfile.gettempdir())  # which its nodes share
    root.mkdir(parents=True, exist_ok=True)
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="cotrain-doctor-", dir=root))
    functions = MACHINE | {
        "run": (partial(engine.run, folder, options.address), engine.REMEDIES["run"]),
        "verify": (partial(engine.verify, folder), engine.REMEDIES["verify"]),
        "context": (partial(engine.context, folder), engine.REMEDIES["context"]),
        "sidecar": (partial(engine.sidecar, folder), engine.REMEDIES["sidecar"]),
    }
    wanted = {*options.only, *(["run"] if "verify" in options.only else [])}  # the drafter is that of the run
    checks = list[Check]()
    try:
        with stop_at_once(), engine_output_to(folder / "engine.log") as stream:
            console = Console(stream)
            for name in filter(wanted.__contains__, names):
                if name == "verify" and checks[-1].status == "fail":
                    continue  # the run has left no drafter
                with console.phase(name, terminal_only=True):
                    checks.append(run_check(name, *functions[name]))
                console.say(str(checks[-1]))
    except BaseException:  # it was stopped
        shutil.rmtree(folder, ignore_errors=True)
        raise
    failed = [check.name for check in checks if check.status == "fail"]
    verdict = f"failed: {', '.join(failed)}" if failed else "nothing failed"
    print(f"{len(checks)} checks in {duration(time.monotonic() - started)}, {verdict}")
    if failed:
        print(f"output of what has failed, and of libraries: {folder}/engine.log")
    else:
        shutil.rmtree(folder)
    if options.json:
        report = here_and_now() | {"passed": not failed, "checks": [asdict(check) for check in checks]}
        write_json(options.json, report)
    return 1 if failed else 0


def run_check(name: str, function: Callable[[], str], remedy: str) -> Check:
    """Run one check. Any exception counts as a failure of it, so that all others are still made."""
    try:
        return Check(name, "pass", function(), "")
    except Exception as error:
        return Check(name, "fail", str(error) or type(error).__name__, remedy)
