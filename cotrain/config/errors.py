"""The texts about a configuration that a user reads: help for each field, and error lines with the problem and the fix."""

import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cotrain.config.schema import RunConfig
from drafters.config import Section

AnySection = TypeVar("AnySection", bound=Section)

LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
NAMES = {"boolean": "true | false", "object": "table"}


@dataclass(frozen=True)
class SectionHelp:
    section: type[Section]
    path: str  # dotted path; "" is the top level
    kind: str | None  # value of `type` when this is one of several kinds of section

    @property
    def location(self) -> tuple[str, ...]:
        """The path as pydantic reports it in errors: its names, and then the kind if there are several."""
        return tuple(part for part in (*self.path.split("."), self.kind) if part)

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        """JSON Schema of each field that holds a value rather than a section, as pydantic writes it."""
        properties: dict[str, dict[str, Any]] = self.section.model_json_schema()["properties"]
        held = self.section.model_fields
        return {name: properties[name] for name in held if not _sections_in(held[name].annotation)}


def walk_sections(root: type[Section] = RunConfig, path: str = "", kind: str | None = None) -> Iterator[SectionHelp]:
    """Yield all sections in the order of the schema, each one before the sections inside it."""
    yield SectionHelp(root, path, kind)
    for name, field in root.model_fields.items():
        sections = _sections_in(field.annotation)
        for section in sections:
            kinds = get_args(section.model_fields["type"].annotation) if len(sections) > 1 else (None,)
            for own in kinds:
                yield from walk_sections(section, f"{path}.{name}".lstrip("."), own)


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]


def type_name(field: dict[str, Any]) -> str:
    """Name a field's type for the help text: `integer > 0`, `greedy | probabilistic`, `list of 3 integers`."""
    if "anyOf" in field:
        return " | ".join(type_name(member) for member in field["anyOf"] if member["type"] != "null")
    if "enum" in field:
        return " | ".join(field["enum"])
    if field["type"] == "array":
        items = field.get("prefixItems", [])
        item = items[0] if items else field["items"]
        return f"list of {len(items) or ''} {item['type']}s".replace("  ", " ")
    limits = " and ".join(f"{symbol} {field[key]}" for key, symbol in LIMITS.items() if key in field)
    name = field.get("format") or NAMES.get(field["type"], field["type"])
    return f"{name} {limits}".rstrip()


def help_text(root: type[Section] = RunConfig) -> str:
    """Every field, grouped by section, with its docstring wrapped to 100 columns."""
    blocks = []
    for block in walk_sections(root):
        title = (f"[{block.path}]" if block.path else "(top level)") + f'  type = "{block.kind}"' * bool(block.kind)
        lines = [title, _wrapped(block.section.__doc__ or "", "  ")]
        for name, field in block.fields.items():
            if name != "type" or not block.kind:
                lines.append(f"  {name}  ({type_name(field)}, {_default(field)})")
                lines.append(_wrapped(field["description"], "      "))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _default(field: dict[str, Any]) -> str:
    """The default as it would be written in TOML."""
    if "default" not in field:
        return "required"
    return "default none" if field["default"] is None else f"default {json.dumps(field['default'])}"


def _wrapped(text: str, indent: str) -> str:
    text = " ".join(text.split())
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


class ConfigError(ValueError):
    """All problems of a configuration, one line each. Every line names the field and the fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {line}" for line in self.problems)]))


def validated(root: type[AnySection], fields: dict[str, Any]) -> AnySection:
    """Build a section from these fields. Raises ConfigError listing every wrong field, including those of nested sections."""
    try:
        return root.model_validate(fields)
    except ValidationError as error:
        blocks = {block.location: block for block in walk_sections(root)}
        raise ConfigError([_readable(detail, blocks) for detail in error.errors(include_url=False)]) from None


def _readable(detail: ErrorDetails, blocks: dict[tuple[str, ...], SectionHelp]) -> str:
    # A number in a location is an index into a list; the error line then names the list.
    location = tuple(part for part in detail["loc"] if isinstance(part, str))
    block, name = blocks.get(location[:-1]), location[-1]
    kinds = {other.kind for other in blocks.values()}
    path = f"{block.path}.{name}".lstrip(".") if block else ".".join(part for part in location if part not in kinds)
    kind, value, message = detail["type"], detail["input"], detail["msg"]
    if block and kind == "extra_forbidden":
        return f"{path}: unknown field{_suggestion(name, block, list(blocks.values()))}"
    if block and kind == "missing" and detail["loc"][-1] == name:
        return f"{path}: missing: {' '.join((block.section.model_fields[name].description or '').split())}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        here = [other.kind for other in blocks.values() if other.path == path and other.kind]
        tag = detail["ctx"].get("tag")
        said = f"{tag!r} is not one of" if tag else "missing; one of"
        return f"{path}.type: {said} {', '.join(here)}{did_you_mean(tag, here)}"
    if kind == "value_error":  # of a section's own check, whose message names value and fix
        return f"{blocks[location].path if location in blocks else path}: {detail['ctx']['error']}"
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
    """Suggest a field of a subsection with this name or these initials, else the most similar name here, else such a field elsewhere,
    else list the names."""
    names = list(block.section.model_fields)

    def found(other: SectionHelp) -> Iterator[str]:
        for leaf in other.fields:
            if name in (leaf, "".join(word[0] for word in leaf.split("_"))):
                yield f"; did you mean {other.path}.{leaf}?".replace(" .", " ")

    # policy.lr means policy.optimizer.learning_rate, and not the similar policy.lora.
    inside = (hint for other in blocks if other.path.startswith(f"{block.path}.") for hint in found(other))
    anywhere = (hint for other in blocks for hint in found(other))
    if hint := next(inside, "") or did_you_mean(name, names, block.path) or next(anywhere, ""):
        return hint
    return f"; {block.path or 'the top level'} has {', '.join(names)}"


def did_you_mean(text: Any, names: Sequence[str], level: str = "") -> str:
    """Return `; did you mean NAME?` for the most similar name, or "" if none is similar."""
    close = difflib.get_close_matches(str(text), names, n=1)
    return f"; did you mean {f'{level}.{close[0]}'.lstrip('.')}?" if close else ""
