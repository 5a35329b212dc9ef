"""JSON files that are whole or absent."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Replace `path` in one move, so that a reader or a crash never meets half a file."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
