"""The longer parts of the commands' --help, which help.toml holds."""

import tomllib
from pathlib import Path


def help_of(command: str) -> str:
    """Return what the help of a command says besides its options."""
    return str(tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))[command])
