"""Seconds of each test file: printed after a session, recorded for `make lint`, and what the next session starts with.

The first session of a checkout orders its files by `file_seconds.json`, which is committed.
Times are those of a process with a core of its own, fixtures included; a fixture that several files share counts for
the file that asked for it first. Tests that are marked `long` may take as long as they want. `python -m tests.file_times`
fails when a file took more than LONGEST_S, or its own limit, and the scatter of times. A machine that is slower, or has
other work, has limits that are as much longer as its files of SPEED_S and more took, at the median.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

LONGEST_S = 90
LONGER = {
    "tests/faults/test_interrupted_run.py": 175,  # three whole runs of about a minute: an interrupted run is one story
    "tests/faults/test_broken_trainer.py": 125,  # with the undisturbed run, which the first file that asks for it makes
    "tests/engine/test_stream_runs.py": 105,  # a run that is killed and resumed, with engines ahead of the learner throughout
    "tests/engine/test_sidecar_server.py": 120,  # a host's server whose drafter learns before and after an update
}
"""Files with a limit of their own, and why."""
SCATTER = 1.2
"""Two runs of the same file differ by a fifth on two cores that are shared; beyond that a file has grown."""
WORTH_PRINTING_S = 120
"""Sessions that take less are those of somebody who runs a few tests."""
SHOWN = 12
SPEED_S = 60.0
"""Files that took this long in the committed record say how fast a machine is, if there are FEW of them: whole runs and engines,
which have several processes and slow each other more than short tests do where cores share a cache or a memory bus."""
FEW = 8

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
    seconds = committed() | recorded()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), sys.maxsize))


def committed() -> dict[str, float]:
    """Seconds that each file took on two quiet cores."""
    return json.loads(COMMITTED.read_text())


def slowness(seconds: dict[str, float]) -> float:
    """Return how many times as long as on two quiet cores files took at the median, and at least 1."""
    known = committed()
    ratios = [s / known[file] for file, s in seconds.items() if known.get(file, 0.0) >= SPEED_S]
    return max(1.0, median(ratios)) if len(ratios) >= FEW else 1.0


def main() -> int:
    """Name the files whose last time is too long."""
    seconds = {file: s for file, s in recorded().items() if (ROOT / file).exists()}
    factor = slowness(seconds)
    limits = {file: factor * LONGER.get(file, LONGEST_S) for file in seconds}
    too_long = {file: s for file, s in seconds.items() if s > SCATTER * limits[file]}
    for file, s in too_long.items():
        print(f"{file} took {s:.0f} s of {limits[file]:.0f}: do less in it, or time it again (pytest {file})")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
