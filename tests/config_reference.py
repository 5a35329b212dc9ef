"""docs/guide/configuration.md from the schema.

python -m tests.config_reference     # writes the page
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cotrain.config.errors import SectionHelp, type_name, walk_sections
from cotrain.config.sidecar import SidecarConfig

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "configuration.md"

HEAD = """\
# Configuration

<!-- written by python -m tests.config_reference -->

A configuration is one or more TOML files. Later files win over earlier ones, and `key=value` on the command line wins over all;
`none` unsets an optional field or section. `cotrain train --help` prints the same reference. [configs/](../../configs/README.md) has
examples. `cotrain train CONFIG --dry-run` prints a whole configuration and checks it.
"""
SIDECAR = """\
## The sidecar

`cotrain run` and `cotrain sidecar` take these fields, and the sections `drafter`, `features`, `tracking` and `checkpoint` of a run.
Fields of these that are as in a run are left out here.
"""


def text() -> str:
    """Return the page."""
    run = list(walk_sections())
    of_run = {(block.path, block.kind): block.fields for block in run}
    parts = [HEAD, "## A run\n"]
    parts += ["\n".join(_section(block, block.fields)) for block in run if block.fields]
    parts.append(SIDECAR)
    for block in walk_sections(SidecarConfig):
        known = of_run.get((block.path, block.kind), {}) if block.path else {}
        fields = {name: field for name, field in block.fields.items() if field != known.get(name)}
        if fields and block.path != "features":
            parts.append("\n".join(_section(block, fields)))
    return "\n".join(parts)


def _section(block: SectionHelp, fields: dict[str, dict[str, Any]]) -> Iterator[str]:
    title = f"`[{block.path}]`" if block.path else "Top level"
    yield f"### {title}" + (f' with `type = "{block.kind}"`' if block.kind else "")
    yield ""
    yield " ".join((block.section.__doc__ or "").split())
    rows = {name: field for name, field in fields.items() if name != "type" or not block.kind}
    if rows:
        yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
    for name, field in rows.items():
        cells = (f"`{name}`", type_name(field), _default(field), " ".join(field["description"].split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "required"
    return "none" if field["default"] is None else f"`{json.dumps(field['default'])}`"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
