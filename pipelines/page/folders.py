"""The folder of a run or a study by its name, and the JSON files in it."""

import difflib
import json
from pathlib import Path
from typing import Any

CONFIG, STUDY = "config.json", "study.json"


def find(name: str, run_root: Path) -> Path:
    """The folder meant. Raises ValueError when it is neither a run nor a study, naming those there are."""
    places = [Path(name), run_root / name]
    for folder in places:
        if (folder / STUDY).is_file() or (folder / CONFIG).is_file():
            return folder
    known = sorted({path.parent.name for file in (CONFIG, STUDY) for path in run_root.glob(f"*/{file}")})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = f"{run_root} holds {', '.join(known)}" if known else f"{run_root} holds none"
    existing = next((folder for folder in places if folder.is_dir()), None)
    if existing is not None:
        raise ValueError(
            f"RUN|STUDY: {existing} is neither a run (no {CONFIG}) nor a study (no {STUDY}); {listed}{hint}"
        )
    raise ValueError(f"RUN|STUDY: no folder {name!r}, here or in {run_root}; {listed}{hint}")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the path."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run or a study")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); restore it or run again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not an object; restore it or run again")
    return content
