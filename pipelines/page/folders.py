"""The folder of a run or a study by its name, and the JSON files in it."""

import json
from pathlib import Path
from typing import Any

from cotrain.config.errors import did_you_mean

CONFIG, STUDY = "config.json", "study.json"


def find(name: str, run_root: Path) -> Path:
    """The folder meant. Raises ValueError when it is neither a run nor a study, naming those there are."""
    for folder in (Path(name), run_root / name):
        if (folder / STUDY).is_file() or (folder / CONFIG).is_file():
            return folder
    known = sorted({path.parent.name for file in (CONFIG, STUDY) for path in run_root.glob(f"*/{file}")})
    raise ValueError(
        f"RUN|STUDY: {name!r} is neither a run (with {CONFIG}) nor a study (with {STUDY}), here or in {run_root}, "
        f"which holds {', '.join(known) or 'none'}{did_you_mean(name, known)}"
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the path."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run or a study")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); restore it or run again") from None
