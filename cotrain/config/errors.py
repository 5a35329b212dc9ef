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
    blocks = {block.location: block for block in walk_sections(root)}
    return [_readable(detail, blocks) for detail in error.errors(include_url=False)]


def _readable(detail: ErrorDetails, blocks: dict[tuple[str, ...], SectionHelp]) -> str:
    # A number in a location is the place of an item in a list; such an error is told about the list.
    location = tuple(part for part in detail["loc"] if isinstance(part, str))
    block, name = blocks.get(location[:-1]), location[-1]
    path = f"{block.path}.{name}".lstrip(".") if block else ".".join(location)
    kind, value, message = detail["type"], detail["input"], detail["msg"]
    if block and kind == "extra_forbidden":
        return f"{path}: unknown field{_suggestion(name, block, list(blocks.values()))}"
    if block and kind == "missing" and detail["loc"][-1] == name:
        return f"{path}: missing: {' '.join((block.section.model_fields[name].description or '').split())}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = [other.kind for other in blocks.values() if other.path == path and other.kind]
        tag = detail["ctx"].get("tag")
        said = f"{tag!r} is not one of" if tag else "missing; one of"
        return f"{path}.type: {said} {', '.join(kinds)}{did_you_mean(tag, kinds)}"
    hint = ""
    if kind == "literal_error":
        hint = did_you_mean(value, re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
    elif kind == "string_type" and isinstance(value, int | float):
        hint = f"; write it in quotes (on the command line: '{name}=\"{value}\"')"
    text = re.sub(r" or instance of \w+", "", message).replace("Input should", "must")
    text = text.replace("tuple", "list").replace("dictionary", "table")
    shown = repr(value)
    return f"{path}: {text}, got {shown if len(shown) <= 60 else f'{shown[:57]}...'}{hint}"


def _suggestion(name: str, block: SectionHelp, blocks: Sequence[SectionHelp]) -> str:
    """The most similar name in this section, else a field of that name or initials elsewhere, else its names."""
    names = list(block.section.model_fields)
    if hint := did_you_mean(name, names, block.path):
        return hint
    # The one nearest to where it was written comes first: policy.lr means policy.optimizer.learning_rate.
    for other in sorted(blocks, key=lambda other: not other.path.startswith(f"{block.path}.")):
        for leaf in other.fields:
            if name in (leaf, "".join(word[0] for word in leaf.split("_"))):
                return f"; did you mean {other.path}.{leaf}?".replace(" .", " ")
    return f"; {block.path or 'the top level'} has {', '.join(names)}"


def did_you_mean(text: Any, names: Sequence[str], level: str = "") -> str:
    """`; did you mean NAME?` for the most similar name, nothing when none is similar."""
    close = difflib.get_close_matches(str(text), names, n=1)
    return f"; did you mean {f'{level}.{close[0]}'.lstrip('.')}?" if close else ""
