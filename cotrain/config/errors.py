"""What a user reads when a configuration is wrong: one line a problem, with the field's path, the value and the fix."""

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cotrain.config.help import type_name, variants, walk_sections
from cotrain.config.rules import BROKEN_RULES
from cotrain.config.schema import RunConfig
from drafters.config import Section


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line a problem, each naming the field and the fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {line}" for line in self.problems)]))


def readable_problems(error: ValidationError, root: type[Section] = RunConfig) -> list[str]:
    """Every error of a section (and the sections in it), one line each."""
    problems = []
    for detail in error.errors(include_url=False):
        path, section = _locate(detail["loc"], root)
        if detail["type"] == BROKEN_RULES:
            problems += [f"{path}.{field}: {message}".lstrip(".") for field, message in detail["ctx"]["problems"]]
        else:
            problems.append(_readable_field(path, section, detail, root))
    return problems


def problems_between_sections(fields: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Broken rules between sections, which pydantic does not check while a field has an error of its own.

    They are checked on `fields` without the wrong ones. A rule whose message names a wrong field waits until that field
    is mended.
    """
    rest, wrong = copy.deepcopy(dict(fields)), set()
    for detail in error.errors(include_url=False):
        path = _locate(detail["loc"], RunConfig)[0]
        rules = detail["ctx"]["problems"] if detail["type"] == BROKEN_RULES else None
        for field in [path] if rules is None else [f"{path}.{name}".lstrip(".") for name, _ in rules]:
            wrong.add(_delete(rest, field.split(".")))
    try:
        RunConfig.model_validate(rest)
    except ValidationError as second:
        found = [detail for detail in second.errors() if detail["type"] == BROKEN_RULES and not detail["loc"]]
        lines = [f"{field}: {message}" for detail in found for field, message in detail["ctx"]["problems"]]
        return [line for line in lines if not any(name in line for name in wrong)]
    return []


def _delete(table: dict[str, Any], path: Sequence[str]) -> str:
    """Take a field out of nested tables; a value that is no table is taken out whole. Returns its own name."""
    *sections, _ = path
    for depth, section in enumerate(sections):
        if not isinstance(table.get(section), dict):
            path = path[: depth + 1]
            break
        table = table[section]
    table.pop(path[-1], None)
    return path[-1]


def _locate(location: tuple[int | str, ...], root: type[Section]) -> tuple[str, type[Section] | None]:
    """Dotted path of pydantic's location (which holds union tags as well), and the section its last part is in."""
    parts, rest = [], list(location)
    holder: type[Section] | None = None
    section: type[Section] | None = root
    while rest:
        name, holder = rest.pop(0), section
        parts.append(str(name))
        field = section.model_fields.get(str(name)) if section is not None else None
        kinds = variants(field.annotation) if field is not None else {}
        if len(kinds) > 1 and rest and rest[0] in kinds:
            section = kinds[str(rest.pop(0))]
        else:
            section = next(iter(kinds.values())) if len(kinds) == 1 else None
    return ".".join(parts), holder


def _readable_field(path: str, section: type[Section] | None, detail: ErrorDetails, root: type[Section]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    name = path.rpartition(".")[2]
    field = section.model_fields.get(name) if section is not None else None
    if kind == "extra_forbidden" and section is not None:
        return f"{path}: unknown field{_suggestion(path, section, root)}"
    if kind == "missing" and field is not None:
        return f"{path}: missing: {' '.join((field.description or '').split())}"
    if kind == "missing":  # an item of a list
        return f"{path.rpartition('.')[0]}: too few values"
    if kind == "union_tag_invalid":
        known = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        hint = did_you_mean(context["tag"], known)
        return f"{path}.type: {_shown(context['tag'])} is not one of {', '.join(known)}{hint}"
    if kind == "union_tag_not_found" and field is not None:
        return f"{path}.type: missing; one of {', '.join(variants(field.annotation))}"
    if kind == "model_type":
        return f"{path}: must be a section of fields, got {_shown(value)}"
    if kind in ("tuple_type", "dict_type", "too_long") and field is not None:
        return f"{path}: must be a {type_name(field.annotation, [])}, got {_shown(value)}"
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, re.findall(r"'([^']+)'", context["expected"]))
    elif kind == "string_type" and isinstance(value, int | float):
        hint = f"; write it in quotes (on the command line: '{name}=\"{value}\"')"
    return f"{path}: {detail['msg'].replace('Input should', 'must')}, got {_shown(value)}{hint}"


def _suggestion(path: str, section: type[Section], root: type[Section]) -> str:
    """The most similar name at this level, else a field of that name or initials elsewhere, else this level's names."""
    level, _, name = path.rpartition(".")
    names = list(section.model_fields)
    if hint := did_you_mean(name, names, level):
        return hint
    elsewhere = [f"{block.path}.{field}".lstrip(".") for block in walk_sections(root) for field in block.fields]
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
