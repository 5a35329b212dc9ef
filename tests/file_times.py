"""Seconds of each test file: printed after a session, recorded for `make lint`, and what the next session starts with.

The first session of a checkout orders its files by `file_seconds.json`, which is committed.
Times are those of a process with a core of its own, fixtures included; a fixture that several files share counts for
the file that asked for it first. Tests that are marked `long` may take as long as they want. `python -m tests.file_times`
fails when a file took more than LONGEST_S and the scatter of times.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

LONGEST_S = 230
"""One file has three whole runs, which are 60 s each on a core, and the one that other files look at."""
SCATTER = 1.2
"""Two runs of the same file differ by a fifth on two cores that are shared; beyond that a file has grown."""
WORTH_PRINTING_S = 120
"""Sessions that take less are those of somebody who runs a few tests."""
SHOWN = 12

ROOT = Path(__file__).parents[1]
RECORD = ROOT / ".pytest_cache" / "file_seconds.json"
COMMITTED = ROOT / "tests" / "file_seconds.json"
"""The record of `make test` on two quiet cores, without the seconds in which a file waited for the run of another."""


def recorded() -> dict[str, float]:
    """Seconds that each file took when it was last run."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class FileTimes:
    """A pytest plugin that adds up the reports of a session, from all of its processes."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "long" not in report.keywords:
            self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        if config.option.keyword or any("::" in argument for argument in config.args):
            return  # a part of a file says nothing about the file
        if any("tests/contracts" in argument for argument in config.args):
            return  # these may take as long as they want
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(recorded() | {file: round(s, 1) for file, s in self.seconds.items()}, indent=1))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.seconds.values()) < WORTH_PRINTING_S:
            return
        terminalreporter.section("seconds of the slowest test files")
        for file, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f}  {file}")


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the recorded time of their file, so that no long one is started last; new files come first."""
    seconds = json.loads(COMMITTED.read_text()) | recorded()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), sys.maxsize))


def main() -> int:
    """Name the files whose last time is too long."""
    too_long = {file: s for file, s in recorded().items() if s > SCATTER * LONGEST_S and (ROOT / file).exists()}
    for file, seconds in too_long.items():
        print(
            f"{file} took {seconds:.0f} s of {LONGEST_S}: do less in it, or time it again on a quiet machine (pytest {file})"
        )
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
