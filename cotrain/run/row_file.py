"""A file of JSON objects, one a line and each of one step, that is readable at once with `tail -f`."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RowFile:
    """Appends rows without a buffer, so that closing the file cannot fail on a full disk."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Keep the rows up to `resumed_step` (0: none); the resumed run writes later ones again."""
        kept = [row for row in read_rows(path) if row["step"] <= resumed_step] if path.exists() else []
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(partial, path)
        self._file = path.open("ab", buffering=0)
        self.close = self._file.close

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Raises OSError (ENOSPC) when the disk took only a part of it, ValueError for NaN."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows. A last line without its line end (a write that was cut off) is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
