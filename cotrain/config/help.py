"""The sections of a configuration and their fields, for `cotrain train --help` and for error messages."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from cotrain.config.schema import RunConfig
from drafters.config import Section

LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
NAMES = {"boolean": "true | false", "object": "table"}


@dataclass(frozen=True)
class SectionHelp:
    section: type[Section]
    path: str
    """Dotted path; "" is the top level."""
    kind: str | None
    """Value of `type` when this is one of several kinds of section."""
    location: tuple[str, ...]
    """Names on the way to it as pydantic reports them, which are those of `path` and the kinds between them."""

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        """JSON Schema of the fields that hold values, as pydantic writes it."""
        properties: dict[str, dict[str, Any]] = self.section.model_json_schema()["properties"]
        held = self.section.model_fields
        return {name: properties[name] for name in held if not _sections_in(held[name].annotation)}


def walk_sections(
    root: type[Section] = RunConfig, path: str = "", kind: str | None = None, location: tuple[str, ...] = ()
) -> Iterator[SectionHelp]:
    """Yield all sections, each before those it holds, in the order of the schema."""
    yield SectionHelp(root, path, kind, location)
    for name, field in root.model_fields.items():
        inner = f"{path}.{name}".lstrip(".")
        sections = _sections_in(field.annotation)
        if len(sections) == 1:
            yield from walk_sections(sections[0], inner, None, (*location, name))
        else:
            for section in sections:
                (own,) = get_args(section.model_fields["type"].annotation)
                yield from walk_sections(section, inner, own, (*location, name, own))


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]


def type_name(field: dict[str, Any]) -> str:
    """A type as a user writes its values: `integer > 0`, `greedy | probabilistic`, `list of 3 integers`."""
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


def help_text(width: int = 100) -> str:
    """Every field, grouped by section, with its docstring wrapped to `width` columns."""
    blocks = []
    for block in walk_sections():
        title = f"[{block.path}]" if block.path else "(top level)"
        title += f'  type = "{block.kind}"' if block.kind else ""
        lines = [title, *_wrap(block.section.__doc__ or "", "  ", width)]
        for name, field in block.fields.items():
            if name != "type" or not block.kind:
                lines.append(f"  {name}  ({type_name(field)}, {_default(field)})")
                lines += _wrap(field["description"], "      ", width)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _default(field: dict[str, Any]) -> str:
    """The default as it would be written in TOML."""
    if "default" not in field:
        return "required"
    return "default none" if field["default"] is None else f"default {json.dumps(field['default'])}"


def _wrap(text: str, indent: str, width: int) -> list[str]:
    text = " ".join(text.split())
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
