"""`cotrain report`: the report of a run or of a study, as one HTML page with its figures."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelines.page.folders import STUDY, find


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
        from pipelines.ablate.report import write_study_report as write
    else:
        from pipelines.train.report import write_run_report as write
    print(write(folder))
    return 0
