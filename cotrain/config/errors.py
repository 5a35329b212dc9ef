"""What a user reads when a configuration is wrong: one line a problem, with the field's path, the value and the fix."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cotrain.config.help import SectionHelp, walk_sections
from cotrain.config.schema import RunConfig
from drafters.config import Section


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line a problem, each naming the field and the fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {line}" for line in self.problems)]))


def readable_problems(error: ValidationError, root: type[Section] = RunConfig) -> list[str]:
    """Every wrong field of a section (and the sections in it), one line each."""
    blocks = list(walk_sections(root))
    return [_readable(detail, blocks) for detail in error.errors(include_url=False)]


def _locate(location: tuple[int | str, ...], blocks: list[SectionHelp]) -> tuple[str, SectionHelp | None]:
    """Dotted path of pydantic's location, which names kinds of sections as well, and the section its last part is in."""
    sections = {(block.path, block.kind): block for block in blocks}
    path = ""
    holder: SectionHelp | None = None
    section: SectionHelp | None = sections["", None]
    for part in location:
        if isinstance(part, int):  # an item of a list is told of as the list
            continue
        if section is None and (path, part) in sections:
            section = sections[path, part]
        else:
            path, holder = f"{path}.{part}".lstrip("."), section
            section = sections.get((path, None))
    return path, holder


def _readable(detail: ErrorDetails, blocks: list[SectionHelp]) -> str:
    kind, value = detail["type"], detail["input"]
    path, section = _locate(detail["loc"], blocks)
    name = path.rpartition(".")[2]
    if kind == "extra_forbidden" and section is not None:
        return f"{path}: unknown field{_suggestion(path, section, blocks)}"
    if kind == "missing" and section is not None and detail["loc"][-1] == name:
        field = (section.fields | section.sections)[name]
        return f"{path}: missing: {' '.join(field.get('description', '').split())}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = [block.kind for block in blocks if block.path == path and block.kind]
        if kind == "union_tag_not_found":
            return f"{path}.type: missing; one of {', '.join(kinds)}"
        tag = detail["ctx"]["tag"]
        return f"{path}.type: {_shown(tag)} is not one of {', '.join(kinds)}{did_you_mean(tag, kinds)}"
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
    elif kind == "string_type" and isinstance(value, int | float):
        hint = f"; write it in quotes (on the command line: '{name}=\"{value}\"')"
    text = re.sub(r" or instance of \w+", "", detail["msg"]).replace("Input should", "must")
    text = text.replace("tuple", "list").replace("dictionary", "table")
    return f"{path}: {text}, got {_shown(value)}{hint}"


def _suggestion(path: str, section: SectionHelp, blocks: list[SectionHelp]) -> str:
    """The most similar name at this level, else a field of that name or initials elsewhere, else this level's names."""
    level, _, name = path.rpartition(".")
    names = [*section.fields, *section.sections]
    if hint := did_you_mean(name, names, level):
        return hint
    elsewhere = [f"{block.path}.{field}".lstrip(".") for block in blocks for field in block.fields]
    # Prefer the one nearest to where it was written: policy.lr means policy.optimizer.learning_rate.
    elsewhere.sort(key=lambda other: not other.startswith(f"{level}."))
    for other in elsewhere:
        leaf = other.rpartition(".")[2]
        if name in (leaf, "".join(word[0] for word in leaf.split("_"))):
            return f"; did you mean {other}?"
    return f"; {level or 'the top level'} has {', '.join(names)}"


def did_you_mean(text: Any, names: Sequence[str], level: str = "") -> str:
    """`; did you mean NAME?` for the most similar name, nothing when none is similar."""
    close = difflib.get_close_matches(str(text), names, n=1)
    return f"; did you mean {f'{level}.{close[0]}'.lstrip('.')}?" if close else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
