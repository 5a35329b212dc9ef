"""The folder of a run or a study by its name."""

from pathlib import Path

from cotrain.config.errors import did_you_mean
from cotrain.config.schema import default_run_root

CONFIG, STUDY = "config.json", "study.json"


def find(name: str) -> Path:
    """The folder of a run or study, by path or by name in the run root. Raises ValueError naming those there if it is none."""
    root = default_run_root()
    for folder in (Path(name), root / name):
        if (folder / STUDY).is_file() or (folder / CONFIG).is_file():
            return folder
    known = sorted({path.parent.name for file in (CONFIG, STUDY) for path in root.glob(f"*/{file}")})
    raise ValueError(
        f"RUN|STUDY: {name!r} is neither a run (with {CONFIG}) nor a study (with {STUDY}), here or in {root}, "
        f"which holds {', '.join(known) or 'none'}{did_you_mean(name, known)}"
    )
