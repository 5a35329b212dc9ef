"""JSON Lines files in which each row belongs to one step.

metrics.jsonl has one row per step, {"step": 12, "policy/reward": 0.41, ...}, and every other view is made from it.
decisions.jsonl has one row per drafter event (cotrain/publish/decision.py).
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RowFile:
    """Appends rows, each written whole before `write` returns."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Keep the rows up to `resumed_step` (0: none); the resumed run writes later ones again."""
        self.path = path
        kept = [row for row in read_rows(path) if row["step"] <= resumed_step]
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(partial, path)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Append one row; a number that is not finite becomes null under its name.

        Raises TypeError for a value that JSON cannot hold, OSError (ENOSPC) when the disk took only a part of the row.
        """
        text = json.dumps({"step": step} | dict(row), default=float)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda _: None))
        line = f"{text}\n".encode()
        with self.path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows; none if the file does not exist. A last line that was cut off is left out.

    Raises ValueError naming the file when another line is damaged.
    """
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path}: a line is not valid JSON ({error}); remove that line") from None
