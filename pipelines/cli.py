"""The `cotrain` command. Imports of torch, Ray, MLflow or vLLM stay inside the commands, so that --help is instant.

Exit status: 0 done, 1 the run's own check failed or a part of it died, 2 something the user can mend.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cotrain.config.errors import ConfigError
from cotrain.config.load import load_config, to_toml
from cotrain.config.schema import RunConfig
from cotrain.process.failures import RunFailure
from cotrain.run.store_uri import DEFAULT_URI, absolute_uri, sqlite_file


class OwnParser(NamedTuple):
    """A command whose module reads its own arguments, in `main(arguments) -> exit status`."""

    module: str
    help: str


OWN_PARSER = {
    "init": OwnParser("pipelines.initialise.command", "train a drafter on the policy's own rollouts, before RL"),
    "ablate": OwnParser("pipelines.ablate.command", "run a study: arms x seeds, and one table"),
    "report": OwnParser("pipelines.report", "write the report of a run or a study"),
    "export": OwnParser(
        "pipelines.export.command", "write a run's policy and drafter as folders that stock vLLM serves"
    ),
    "verify": OwnParser("pipelines.verify.command", "test whether speculation leaves the sampled distribution alone"),
    "bench": OwnParser("pipelines.bench.command", "measure speculation arms side by side on one engine"),
}

OWN_PACKAGES = ("cotrain", "drafters", "pipelines")
UI_PORT = 5000

TRAIN_EPILOG = """\
CONFIG files are TOML; later ones win over earlier ones, key=value over all of them. A value is written as in TOML,
quotes may be left out, and `none` unsets an optional field or section:

  cotrain train configs/smoke.toml
  cotrain train configs/smoke.toml name=second policy.optimizer.learning_rate=1e-5
  cotrain train configs/smoke.toml name=baseline drafter=none
  cotrain train --resume second steps=20

Fields of a configuration
=========================
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user are printed without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if arguments and arguments[0] in OWN_PARSER:
            command = importlib.import_module(OWN_PARSER[arguments[0]].module)
            return int(command.main(arguments[1:]))
        parsed = _parse(arguments)
        status: int = parsed.run(parsed)
        return status
    except RunFailure as failure:
        print(f"cotrain: {failure}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        if not _is_message_to_the_user(error):
            raise
        print(f"cotrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _is_message_to_the_user(error: Exception) -> bool:
    """Raised by our own code, which does so for what a user can mend. An error of a library is a defect."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return (frame.f_globals.get("__package__") or "").partition(".")[0] in OWN_PACKAGES


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser(arguments)
    parsed, rest = parser.parse_known_args(arguments)
    # argparse takes only the first group of files and overrides when options stand between them.
    if rest and (parsed.run is not _train or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.config += rest
    return parsed


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cotrain",
        description="Joint policy-drafter training: RL rollouts whose speculation keeps up with the policy.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a policy and its drafter",
        usage="cotrain train CONFIG... [key=value...] [--dry-run] [--resume NAME]",
        description="Train a policy, and beside it the drafter that its rollouts speculate with.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if arguments[:1] == ["train"] and {"-h", "--help"} & set(arguments):
        from cotrain.config.help import help_text

        train.epilog = TRAIN_EPILOG + help_text()
    train.add_argument("config", nargs="*", metavar="CONFIG", help="TOML files, and overrides section.field=value")
    train.add_argument("--dry-run", action="store_true", help="check, print the whole configuration as TOML, and stop")
    train.add_argument("--resume", metavar="NAME", help="continue this run; CONFIG and overrides come after its own")
    train.set_defaults(run=_train)

    for name, own in OWN_PARSER.items():
        commands.add_parser(name, help=own.help, add_help=False)

    drafters = commands.add_parser("drafters", help="drafters that runs have published")
    actions = drafters.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all versions, newest first")
    listing.set_defaults(run=_list_drafters)
    pull = actions.add_parser("pull", help="copy one into a folder that vLLM serves as it is")
    pull.add_argument("name", metavar="NAME[@alias|/version]", help="NAME alone means NAME@serving")
    pull.add_argument("folder", metavar="DIR", type=Path, help="a new folder")
    pull.set_defaults(run=_pull_drafter)
    ui = commands.add_parser("ui", help="print how to look at the runs in a browser")
    ui.set_defaults(run=_ui)
    for command in (listing, pull, ui):
        command.add_argument("--uri", default=DEFAULT_URI, help="MLflow tracking URI (default %(default)s)")
    return parser


def _train(parsed: argparse.Namespace) -> int:
    # An override may hold a slash or a dot, a file name an equals sign: a file that exists is a file.
    overrides = [text for text in parsed.config if "=" in text and not Path(text).is_file()]
    files = [text for text in parsed.config if text not in overrides]
    if not files and not overrides and parsed.resume is None:
        raise ConfigError(["CONFIG: no configuration given, for example configs/smoke.toml; see cotrain train --help"])
    config = load_config(files, overrides, parsed.resume)
    resume = parsed.resume is not None
    if parsed.dry_run:
        return _dry_run(config, resume)
    from pipelines.preflight import check_run

    check_run(config, resume)
    from pipelines.train.joint import train

    return train(config, resume)


def _dry_run(config: RunConfig, resume: bool) -> int:
    from pipelines.preflight import quick_problems

    print(to_toml(config), flush=True)
    if problems := quick_problems(config, resume):
        raise ConfigError(problems)
    print("\n".join(f"# {line}" for line in _plan(config)))
    print("# no problem found; model, data and drafter.init are looked at when the run starts")
    return 0


def _plan(config: RunConfig) -> list[str]:
    """What would run where."""
    from cotrain.process.cluster import place
    from cotrain.run.provenance import machine
    from pipelines.preflight import tap_note

    policy, rollout, drafter = config.policy, config.rollout, config.drafter
    if config.cluster.address is not None:
        devices = dict.fromkeys(("engine", "learner", "drafter"), f"on the Ray cluster at {config.cluster.address}")
    else:
        here = machine()
        placement = place(config, len(here["gpus"]))
        device = f"on {placement.gpus:g} GPU each" if placement.gpus else f"on the CPU, {here['cores']} cores"
        devices = dict.fromkeys(("engine", "learner", "drafter"), device)
    speculation = f"{rollout.draft_tokens} draft tokens, {rollout.draft_sample_method}" if drafter else "no speculation"
    lines = [
        f"run      {config.run_root / config.name}, {config.steps} steps",
        f"rollout  {rollout.num_engines} x vLLM {devices['engine']}; {speculation}; {rollout.prompts_per_step} prompts x "
        f"{rollout.samples_per_prompt} samples a step, up to {rollout.max_new_tokens} tokens each",
        f"policy   {policy.num_processes} x learner {devices['learner']}; {policy.model}",
    ]
    if drafter is not None:
        training = (
            f"{drafter.updates_per_step} updates every {drafter.train_every} steps" if drafter.train else "frozen"
        )
        lines.append(
            f"drafter  1 x trainer {devices['drafter']}; {drafter.model.type} from {drafter.init or 'the head that the policy brings, or random weights'}, "
            f"{training}"
        )
    local = Path(policy.model).expanduser()
    if note := tap_note(config, local if local.is_dir() else None):
        lines.append(f"tap      {note}")
    return [*lines, f"mlflow   {config.tracking.uri or f'sqlite in {config.run_root}'}"]


def _list_drafters(parsed: argparse.Namespace) -> int:
    from cotrain.run.registry import list_drafters, print_drafters

    print_drafters(list_drafters(absolute_uri(parsed.uri)), sys.stdout)
    return 0


def _pull_drafter(parsed: argparse.Namespace) -> int:
    from cotrain.run.registry import pull_drafter

    row = pull_drafter(absolute_uri(parsed.uri), parsed.name, parsed.folder)
    versions = f"p{row.tags['policy_version']}-d{row.tags['drafter_version']} of {row.tags['run_name']}"
    print(f"{row.name}/{row.version} ({versions}) is in {parsed.folder}")
    return 0


def _ui(parsed: argparse.Namespace) -> int:
    """A server's page, or the command that serves an sqlite file and the page it then has."""
    # Without workflowType MLflow opens in its GenAI view, which shows neither charts nor registered models.
    page = "#/experiments?workflowType=machine_learning"
    if parsed.uri.startswith(("http://", "https://")):
        print(f"{parsed.uri.rstrip('/')}/{page}")
        return 0
    uri = absolute_uri(parsed.uri)
    if (database := sqlite_file(uri)) and not database.exists():
        raise ValueError(f"--uri: {database} does not exist yet; a run writes it, or give the URI of another store")
    print(f"mlflow server --backend-store-uri {uri} --workers 1 --port {UI_PORT}")
    print(f"then open http://127.0.0.1:{UI_PORT}/{page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
