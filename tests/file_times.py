"""Seconds of each test file, printed at the end of a session.

Times are those of a process with a core of its own, fixtures included; a fixture that several files share counts for
the file that asked for it first.
"""

from collections import Counter

import pytest

WORTH_PRINTING_S = 120
"""Sessions that take less are those of somebody who runs a few tests."""
SHOWN = 12


class FileTimes:
    """A pytest plugin that adds up the reports of a session, from all of its processes."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.seconds.values()) < WORTH_PRINTING_S:
            return
        terminalreporter.section("seconds of the slowest test files")
        for file, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f}  {file}")
