"""The folder of a run or a study by its name."""

from pathlib import Path

from cotrain.config.errors import did_you_mean

CONFIG, STUDY = "config.json", "study.json"
RUNS = Path("runs")


def find(name: str) -> Path:
    """The folder of a run or study, by path or by name below runs/. Raises ValueError naming those in runs/ if it is none."""
    for folder in (Path(name), RUNS / name):
        if (folder / STUDY).is_file() or (folder / CONFIG).is_file():
            return folder
    known = sorted({path.parent.name for file in (CONFIG, STUDY) for path in RUNS.glob(f"*/{file}")})
    raise ValueError(
        f"RUN|STUDY: {name!r} is neither a run (with {CONFIG}) nor a study (with {STUDY}), here or in {RUNS}, "
        f"which holds {', '.join(known) or 'none'}{did_you_mean(name, known)}"
    )
