"""`cotrain report`: the report of a run or of a study, as one HTML page with its figures."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

CONFIG, STUDY = "config.json", "study.json"


def main(arguments: Sequence[str]) -> int:
    """Write the report and print its path."""
    parser = argparse.ArgumentParser(
        prog="cotrain report",
        description="Write the report of a run or a study into its report/ folder: report.html, which needs no other "
        "file, and its figures as PNGs; for a study also its table as Markdown and CSV.",
    )
    parser.add_argument("folder", metavar="RUN|STUDY", help="a folder, or a name below the run root")
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="folder of all runs (default %(default)s)")
    options = parser.parse_args(arguments)
    folder = find(options.folder, options.run_root)
    if (folder / STUDY).is_file():
        from cotrain.report.study import write_study_report as write
    else:
        from cotrain.report.run import write_run_report as write
    print(write(folder))
    return 0


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
