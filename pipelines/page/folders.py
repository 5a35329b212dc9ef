"""The folder of a run or a study by its name."""

from pathlib import Path

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
