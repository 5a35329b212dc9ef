"""Seconds of each test file: printed at the end of a session, kept for `make lint`, which refuses a slow file.

Times are those of a process with a core of its own, fixtures included; a fixture that several files share counts for
the file that asked for it first.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

KEPT = Path(".pytest_cache/file_times.json")
LIMIT_S = 120
SHOWN = 12


class FileTimes:
    """A pytest plugin that adds up the reports of a session, from all of its processes."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.seconds.values()) < LIMIT_S:
            return  # somebody runs a few tests
        terminalreporter.section("seconds of the slowest test files")
        for file, seconds in self.seconds.most_common(SHOWN):
            note = f"  over {LIMIT_S} s: make lint refuses it" if seconds > LIMIT_S else ""
            terminalreporter.write_line(f"{seconds:7.1f}  {file}{note}")
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(known_times() | self.seconds, indent=1, sort_keys=True))


def known_times() -> dict[str, float]:
    """Seconds by file in the sessions so far; empty before the first one."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def main() -> int:
    """Names the files that were over the limit when they ran last. Exit status 1 when there is one."""
    slow = {file: seconds for file, seconds in known_times().items() if seconds > LIMIT_S and Path(file).exists()}
    for file, seconds in slow.items():
        print(f"{file} took {seconds:.0f} s, the limit is {LIMIT_S}: share a run or an engine, or part the file")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
