"""`cotrain init`: its arguments. What it does is in pipelines/initialise/pipeline.py, which takes seconds to import."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cotrain.config.errors import ConfigError
from cotrain.config.load import load_config, to_toml
from pipelines.preflight import init_problems, quick_problems

EPILOG = """\
Reads [policy], [rollout], [drafter], [task] and [init] of the configuration; see docs/initialisation.md.

  cotrain init configs/smoke.toml name=first-drafter init.tokens=5000
  cotrain init configs/smoke.toml name=other init.source.type=rollouts init.source.path=runs/first-drafter
  cotrain init --resume first-drafter
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    parser = argparse.ArgumentParser(
        prog="cotrain init",
        usage="cotrain init CONFIG... [key=value...] [--dry-run] [--resume NAME]",
        description="Train a drafter on rollouts of the policy, before RL: in-domain initialisation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="*", metavar="CONFIG", help="TOML files, and overrides section.field=value")
    parser.add_argument("--dry-run", action="store_true", help="check, print the whole configuration as TOML, and stop")
    parser.add_argument("--resume", metavar="NAME", help="continue this run")
    parsed = parser.parse_intermixed_args(argv)
    overrides = [text for text in parsed.config if "=" in text and not Path(text).is_file()]
    files = [text for text in parsed.config if text not in overrides]
    if not files and not overrides and parsed.resume is None:
        raise ConfigError(["CONFIG: no configuration given, for example configs/smoke.toml; see cotrain init --help"])
    config = load_config(files, overrides, parsed.resume)
    resume = parsed.resume is not None
    if parsed.dry_run:
        print(to_toml(config), flush=True)
        if problems := [*init_problems(config), *quick_problems(config, resume)]:
            raise ConfigError(problems)
        print("# no problem found; model, init.source and drafter.init are checked when the run starts")
        return 0
    from pipelines.initialise.pipeline import initialise

    return initialise(config, resume)
