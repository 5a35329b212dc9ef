"""The `cotrain` command. Imports of torch, Ray, MLflow or vLLM stay inside the commands, so that --help is instant.

Exit status: 0 done, 1 the run's own check failed or a part of it died, 2 an error that the user can fix, 130 interrupted, 141 the
reader of its output, such as `head`, is gone.
"""

import argparse
import importlib
import os
import select
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from cotrain import __version__
from cotrain.process.failures import RunFailure
from cotrain.process.scratch import remove_scratch_folders
from cotrain.process.stopping import INTERRUPTED
from cotrain.run.mlflow_store import absolute_uri, default_uri
from pipelines.help import CommandParser

COMMANDS = {
    "train": ("pipelines.train.joint:main", "train a policy and its drafter"),
    "run": ("pipelines.sidecar.command:run", "train a drafter beside your own trainer or server (COMMAND after --)"),
    "sidecar": ("pipelines.sidecar.command:sidecar", "the same in two terminals, or check your engine beforehand"),
    "init": ("pipelines.train.joint:init", "train a drafter on the policy's own rollouts, before RL"),
    "ablate": ("pipelines.ablate.command:main", "run a study: arms x seeds, and one table"),
    "report": ("pipelines.cli:report", "write the report of a run or a study"),
    "export": ("pipelines.export.command:main", "write a run's policy and drafter as folders that stock vLLM serves"),
    "evaluate": ("pipelines.evaluate:main", "score a run's policy, or one in a folder, on held-out prompts"),
    "verify": ("pipelines.verify.command:main", "test whether speculation leaves the sampled distribution alone"),
    "bench": ("pipelines.bench.command:main", "measure speculation arms side by side on one engine"),
    "simulate": ("pipelines.simulate.command:main", "simulate a system or a run, with and without speculation"),
    "models": ("pipelines.models:main", "say what a policy can do: which drafters, and with which limits"),
    "doctor": ("pipelines.doctor.command:main", "check this machine or cluster before a run is started on it"),
    "drafters": ("pipelines.cli:drafters", "list or pull the drafters that runs have published"),
}
"""By command: its function, which takes the arguments and returns the exit status, and its help text."""

OWN_PACKAGES = ("cotrain", "drafters", "pipelines")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user are printed without a traceback."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # another pipe, whose end is a defect
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 141


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if arguments[0] not in COMMANDS:
            parser = argparse.ArgumentParser(
                prog="cotrain",
                description="Joint policy-drafter training: RL rollouts whose speculation keeps up with the policy.",
            )
            parser.add_argument("--version", action="version", version=f"cotrain {__version__}")
            commands = parser.add_subparsers(required=True, metavar="COMMAND")
            for name, (_, text) in COMMANDS.items():
                commands.add_parser(name, help=text)
            parser.parse_args(arguments)  # prints help, or what is wrong, and exits
        if os.path.expanduser("~") == "~":  # MLflow and others could not even be imported
            fix = "set HOME to a folder that can be written"
            raise ValueError(f"HOME: it is not set, and this user has no home folder; {fix}")
        module, _, function = COMMANDS[arguments[0]][0].partition(":")
        return int(getattr(importlib.import_module(module), function)(arguments[1:]))
    except RunFailure as failure:
        return _fail(failure, 1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OWN_PACKAGES:
            raise
        return _fail(f"{error.name} is not installed; commands need cotrain[trainer] (docs/guide/sidecar.md)", 2)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) or not _is_message_to_the_user(error):
            raise
        return _fail(error, 2)
    except KeyboardInterrupt:
        if argv is None:  # this is the process of the command
            sys.stdout.flush()
            remove_scratch_folders()
            os._exit(INTERRUPTED)  # without waiting for threads, which may import something or set up MLflow
        return INTERRUPTED


def _fail(message: object, status: int) -> int:
    print(f"cotrain: {message}", file=sys.stderr)
    return status


def _is_message_to_the_user(error: Exception) -> bool:
    """Whether our own code has raised this error, for something that a user can fix. Errors of a library are defects."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return (frame.f_globals.get("__package__") or "").partition(".")[0] in OWN_PACKAGES


def report(arguments: Sequence[str]) -> int:
    parser = CommandParser("report")
    parser.add_argument("folder", metavar="RUN|STUDY", help="a folder, or a name in the run root")
    options = parser.parse_args(arguments)
    from pipelines.page.record import STUDY, find

    folder = find(options.folder)
    if (folder / STUDY).is_file():
        from pipelines.ablate.report import write_study_report as write
    else:
        from pipelines.train.report import write_run_report as write
    print(write(folder).with_suffix(".html"))
    return 0


def drafters(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="cotrain drafters")
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("list", help="all versions, newest first")
    pull = actions.add_parser("pull", help="copy one into a folder that vLLM serves as it is")
    pull.add_argument("name", metavar="NAME[@alias|/version]", help="NAME alone means NAME@serving")
    pull.add_argument("folder", metavar="DIR", type=Path, help="a new folder")
    for action in (listing, pull):
        action.add_argument("--uri", default=default_uri(), help="MLflow tracking URI (default %(default)s)")
    parsed = parser.parse_args(arguments)
    from cotrain.run.registry import drafter_table, list_drafters, pull_drafter

    if parsed.action == "list":
        print(drafter_table(list_drafters(absolute_uri(parsed.uri)), absolute_uri(parsed.uri)))
        return 0
    row = pull_drafter(absolute_uri(parsed.uri), parsed.name, parsed.folder)
    versions = "p{policy_version}-d{drafter_version} of {run_name} for {policy}".format(**row.tags)
    print(f"{row.name}/{row.version} ({versions}) is in {parsed.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
