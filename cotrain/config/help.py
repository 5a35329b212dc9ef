"""Every field of RunConfig with its type, default and docstring, for `cotrain train --help` and for error messages."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from cotrain.config.schema import RunConfig
from drafters.config import Section

SYMBOLS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}
NAMES = {int: "integer", float: "number", str: "string", bool: "true | false", Path: "path", dict: "table"}


@dataclass(frozen=True)
class SectionHelp:
    """One section and the fields that are no sections themselves."""

    path: str
    """Dotted path; "" is the top level."""
    section: type[Section]
    kind: str | None
    """Value of `type` when this is one of several kinds of section."""
    fields: dict[str, FieldInfo]


def variants(annotation: Any) -> dict[str, type[Section]]:
    """The sections a field can hold, by the value of their `type` (class name where they have none)."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return {kind_of(annotation) or annotation.__name__: annotation}
    if get_origin(annotation) in (Union, UnionType, Annotated):
        found: dict[str, type[Section]] = {}
        for member in get_args(annotation):
            found |= variants(member)
        return found
    return {}


def kind_of(section: type[Section]) -> str | None:
    """Value that `type` must have in a section of a union."""
    field = section.model_fields.get("type")
    return get_args(field.annotation)[0] if field is not None else None


def walk_sections(section: type[Section] = RunConfig, path: str = "", union: bool = False) -> Iterator[SectionHelp]:
    """All sections, each before those it holds, in the order of the schema."""
    held = {name: variants(field.annotation) for name, field in section.model_fields.items()}
    plain = {name: field for name, field in section.model_fields.items() if not held[name]}
    yield SectionHelp(path, section, kind_of(section) if union else None, plain)
    for name, kinds in held.items():
        for kind in kinds.values():
            yield from walk_sections(kind, f"{path}.{name}".lstrip("."), union=len(kinds) > 1)


def type_name(annotation: Any, constraints: list[Any]) -> str:
    """A type as a user writes its values: `integer > 0`, `greedy | probabilistic`, `list of 3 integers`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0], [*arguments[1:], *constraints])
    if origin in (Union, UnionType):
        return " | ".join(type_name(member, constraints) for member in arguments if member is not NoneType)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is tuple:
        item = type_name(arguments[0], []).split()[0]  # without its limits
        return f"list of {item}s" if Ellipsis in arguments else f"list of {len(arguments)} {item}s"
    name = NAMES[origin or annotation]
    limits = [f"{SYMBOLS[type(limit)][1]} {getattr(limit, SYMBOLS[type(limit)][0])}" for limit in constraints]
    return f"{name} {' and '.join(limits)}".rstrip()


def default_text(field: FieldInfo) -> str:
    """The default as it would be written in TOML; `required` when there is none."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "default none"
    if isinstance(value, bool):
        return f"default {str(value).lower()}"
    if isinstance(value, tuple):
        return f"default {list(value)}"
    if isinstance(value, str):
        return f'default "{value}"'
    return f"default {value}"


def help_text(width: int = 100) -> str:
    """Every field, grouped by section, with its docstring wrapped to `width` columns."""
    blocks = []
    for block in walk_sections():
        title = f"[{block.path}]" if block.path else "(top level)"
        title += f'  type = "{block.kind}"' if block.kind else ""
        lines = [title, *_wrap(block.section.__doc__ or "", "  ", width)]
        for name, field in block.fields.items():
            if name == "type" and block.kind:
                continue
            lines.append(f"  {name}  ({type_name(field.annotation, field.metadata)}, {default_text(field)})")
            lines += _wrap(field.description or "", "      ", width)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _wrap(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
