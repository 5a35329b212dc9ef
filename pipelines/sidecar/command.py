"""`cotrain run` and `cotrain sidecar`: train a drafter beside a trainer or server that belongs to somebody else.

The drafter's trainer is a process of its own in both. docs/guide/sidecar.md says what happens in the host.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from cotrain.config.sidecar import SidecarConfig, load_sidecar
from cotrain.engine.host.adoption import CHECK_VARIABLE
from cotrain.process.children import two_stage_stop
from cotrain.process.threads import low_priority
from cotrain.run.console import aligned
from cotrain.sidecar.launch import CAUSES, run_host, trainer_beside
from cotrain.transport.spool import VARIABLE, Verdict
from drafters.config import KINDS
from pipelines.help import CommandParser
from pipelines.plan import serve_command


def run(arguments: Sequence[str]) -> int:
    """Run `cotrain run`: the trainer's process and the host's command. Returns the host's exit status."""
    options, host = _parsed(_parser("run", "-- COMMAND ..."), arguments)
    config = _configured(options)
    given = [f"--with-parent={os.getpid()}", f"--share={config.share}", *arguments[: arguments.index("--")]]
    # Its default name would differ.
    command = [sys.executable, "-m", "pipelines.cli", "sidecar", *given, f"name={config.name}"]
    with trainer_beside(command, config.spool_folder):
        return run_host(host, config.spool_folder)


def sidecar(arguments: Sequence[str]) -> int:
    """Run `cotrain sidecar`: the trainer alone, until a signal ends it, or the check of a host's command."""
    if arguments and arguments[0] == "check":
        return check(arguments[1:])
    parser = _parser("sidecar", "--spool DIR --share S")
    parser.add_argument("--spool", metavar="DIR", help="folder that trainer and engines share; /dev/shm is memory")
    text = "share of the requests that are trained on, above 0 and up to 1; it must be given, here or in FILE"
    parser.add_argument("--share", type=float, metavar="S", help=text)
    parser.add_argument("--with-parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    config = _configured(options)
    if options.share is None and "share" not in config.model_fields_set:
        raise ValueError("--share: say which share of the requests may be trained on, for example --share 0.1")
    os.environ |= {"OMP_NUM_THREADS": str(config.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}  # before torch is imported

    def ready(folder: str) -> str:
        model = folder if ":" in config.model else config.model  # vLLM does not know names like bundled:...
        line = f"{VARIABLE}={shlex.quote(str(config.spool_folder))} {serve_command(model)}"
        return f"\nstart the engine in another terminal:\n  {line}" if parent is None else ""

    parent = options.with_parent
    with low_priority(config.nice), two_stage_stop(print, "round") as asked:
        from cotrain.sidecar.service import serve  # its threads get the priority

        stop = asked if parent is None else lambda: asked() or os.getppid() != parent  # it ends when its parent does
        seen = serve(config, options.resume is not None, stop, ready)
    print(summary(config.run_root / config.name, *seen), flush=True)
    return 0


def check(arguments: Sequence[str]) -> int:
    """Run `cotrain sidecar check`. Returns 0 if an engine would be adopted, else 1."""
    from cotrain.sidecar.prepare import prepare

    options, host = _parsed(_parser("sidecar check", "-- COMMAND ..."), arguments)
    with tempfile.TemporaryDirectory(prefix="cotrain-check-") as scratch, ExitStack() as stack:
        options.overrides += [f"run_root={scratch}", f"spool={scratch}/spool"]
        spool = prepare(_configured(options), False, stack).spool  # while the stack is open, it has a trainer
        run_host(host, spool.folder, **{CHECK_VARIABLE: "1"})
        verdicts = spool.verdicts()
    print(f"\nengines: {engines_text(verdicts)}")
    return 0 if any(verdict.reason is None for verdict in verdicts) else 1


def summary(run: Path, verdicts: Sequence[Verdict], left_out: str) -> str:
    """Summarise a run for somebody who sees one for the first time. run: the run folder."""
    from pipelines.page.record import read_run
    from pipelines.train.report import progress, run_facts, write_run_report

    lines, done = {"engines": engines_text(verdicts).replace("\n", "\n" + " " * 14)}, "no round of training"
    lines |= {"left out": left_out} if left_out else {}
    if (run / "metrics.jsonl").read_text():
        record = read_run(run)
        done = progress(record)
        lines |= run_facts(record) | {"report": str(write_run_report(run).with_suffix(".html"))}
    return f"\nDone: {done}\n{aligned(lines | {'run folder': str(run)})}"


def engines_text(verdicts: Sequence[Verdict]) -> str:
    """Say how many engines were adopted, and why others were not, from what Spool.verdicts returns."""
    adopted = {verdict.pid for verdict in verdicts if verdict.reason is None}
    others = dict.fromkeys(f"not adopted, {v.model}: {v.reason}" for v in verdicts if v.reason is not None)
    return "\n".join([f"{len(adopted)} adopted"] * bool(adopted) + [*others]) or CAUSES


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before the first --, and the command after it. Raises ValueError if there is no such command."""
    at = [*arguments, "--"].index("--")
    options, host = parser.parse_intermixed_args(arguments[:at]), list(arguments[at + 1 :])
    if not host:
        raise ValueError(f"the command of your trainer or server is missing; write it after --, as in: {parser.usage}")
    if shutil.which(host[0]) is None:
        raise ValueError(f"COMMAND: {host[0]} cannot be run here; give its path, or activate its environment")
    return options, host


def _parser(command: str, rest: str) -> argparse.ArgumentParser:
    usage = f"cotrain {command} --model M [--drafter D] [--config FILE] [--resume NAME] [key=value ...] {rest}"
    parser = CommandParser(command, SidecarConfig, usage=usage)
    parser.add_argument("--model", metavar="M", help="the policy, as your trainer or server names it")
    text = f"{', '.join(KINDS)}, or first weights: a folder or models:/NAME@serving (default eagle3, random weights)"
    parser.add_argument("--drafter", metavar="D", help=text)
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="TOML file; may be repeated")
    parser.add_argument("--resume", metavar="NAME", help="continue the run NAME, with its drafter")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any field of the configuration")
    return parser


def _configured(options: argparse.Namespace) -> SidecarConfig:
    """Return the configuration. Raises ConfigError listing all problems."""
    given = {name: getattr(options, name, None) for name in ("model", "spool", "share")}
    overrides = [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    if options.drafter in KINDS:
        overrides.append(f"drafter.model.type={options.drafter}")
    elif options.drafter:
        if not (options.drafter.startswith(("models:/", "native")) or Path(options.drafter).is_dir()):
            known = f"{', '.join(KINDS)}, native, a folder or models:/NAME@serving"
            raise ValueError(f"--drafter: {options.drafter!r} is no folder; give one of {known}")
        overrides.append(f"drafter.init={json.dumps(options.drafter)}")
    return load_sidecar(options.config, overrides + options.overrides, options.resume)
