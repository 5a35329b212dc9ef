"""The parsers of the commands. help.toml holds the parts of their --help that are longer than an option's."""

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it takes a second to import
    from drafters.config import Section


class CommandParser(argparse.ArgumentParser):
    """A parser with description and epilog of its command in help.toml, and the fields of a configuration after them."""

    def __init__(self, command: str, fields: "type[Section] | None" = None, **options: Any) -> None:
        texts = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))[command]
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"cotrain {command}", formatter_class=formatter, **texts, **options)
        self._fields = fields

    def format_help(self) -> str:
        from cotrain.config.errors import help_text

        return super().format_help() + (f"{help_text(self._fields)}\n" if self._fields else "")
