"""The folder of a run or a study by its name."""

from pathlib import Path

from cotrain.config.errors import did_you_mean

CONFIG, STUDY = "config.json", "study.json"
RUNS = Path("runs")


def find(name: str) -> Path:
    """The folder of this path, or name below runs/. Raises ValueError for neither a run nor a study, naming those there are."""
    for folder in (Path(name), RUNS / name):
        if (folder / STUDY).is_file() or (folder / CONFIG).is_file():
            return folder
    known = sorted({path.parent.name for file in (CONFIG, STUDY) for path in RUNS.glob(f"*/{file}")})
    raise ValueError(
        f"RUN|STUDY: {name!r} is neither a run (with {CONFIG}) nor a study (with {STUDY}), here or in {RUNS}, "
        f"which holds {', '.join(known) or 'none'}{did_you_mean(name, known)}"
    )
