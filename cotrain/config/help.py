"""The sections of a configuration and their fields, for `cotrain train --help` and for error messages."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cotrain.config.schema import RunConfig
from drafters.config import Section

LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
NAMES = {"boolean": "true | false", "object": "table"}


@dataclass(frozen=True)
class SectionHelp:
    """One section of a configuration. Fields are described in JSON Schema, as pydantic writes it."""

    path: str
    """Dotted path; "" is the top level."""
    kind: str | None
    """Value of `type` when this is one of several kinds of section."""
    description: str
    fields: dict[str, Any]
    """The fields that hold values."""
    sections: dict[str, Any]
    """The fields that hold sections."""


def walk_sections(root: type[Section] = RunConfig) -> Iterator[SectionHelp]:
    """Yield all sections, each before those it holds, in the order of the schema."""
    schema = root.model_json_schema()
    yield from _walk(schema, schema.get("$defs", {}), "", None)


def _walk(section: dict[str, Any], known: dict[str, Any], path: str, kind: str | None) -> Iterator[SectionHelp]:
    properties: dict[str, Any] = section["properties"]
    held = {name: _references(field) for name, field in properties.items()}
    for name, field in properties.items():
        field["required"] = name in section.get("required", ())
    yield SectionHelp(
        path,
        kind,
        section.get("description", ""),
        {name: field for name, field in properties.items() if not held[name]},
        {name: field for name, field in properties.items() if held[name]},
    )
    for name, references in held.items():
        for reference in references:
            inner = known[reference]
            inner_kind = inner["properties"]["type"]["const"] if len(references) > 1 else None
            yield from _walk(inner, known, f"{path}.{name}".lstrip("."), inner_kind)


def _references(field: dict[str, Any]) -> list[str]:
    members = field.get("oneOf") or field.get("anyOf") or [field]
    return [member["$ref"].rpartition("/")[2] for member in members if "$ref" in member]


def type_name(field: dict[str, Any]) -> str:
    """A type as a user writes its values: `integer > 0`, `greedy | probabilistic`, `list of 3 integers`."""
    if "anyOf" in field:
        return " | ".join(type_name(member) for member in field["anyOf"] if member["type"] != "null")
    if "enum" in field or "const" in field:
        return " | ".join(field.get("enum") or [field["const"]])
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
        lines = [title, *_wrap(block.description, "  ", width)]
        for name, field in block.fields.items():
            if name != "type" or not block.kind:
                lines.append(f"  {name}  ({type_name(field)}, {_default(field)})")
                lines += _wrap(field["description"], "      ", width)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _default(field: dict[str, Any]) -> str:
    """The default as it would be written in TOML."""
    if field["required"]:
        return "required"
    return "default none" if field["default"] is None else f"default {json.dumps(field['default'])}"


def _wrap(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
