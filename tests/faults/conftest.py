"""The engine of tests/engine, what a run as a process needs, and the table of faults at the end of a test session."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import (  # noqa: F401
    drafter_folder,
    engine,
    fitted_drafter,
    fresh,
    moved_target_state,
    rollout_config,
    sampled_text,
    target_folder,
    target_model,
    target_state,
    target_weights,
    untrained_drafter,
)
from tests.engine.runs import straight_run

NUM_FAULTS = 15
COLUMNS = ("fault", "what was done", "caught by", "steps", "tokens lost")

Fault = Callable[..., None]


@pytest.fixture
def fault(record_property: Callable[[str, Any], None]) -> Fault:
    """fault("2a", what, caught_by, steps=0, tokens_lost=0): one row of the table; call it when all is asserted.

    steps: RL steps from the fault to its discovery, 0 when nothing was served or trained with it. tokens_lost: tokens
    of finished steps that are missing, doubled or other than without the fault, measured after recovery.
    """

    def record(name: str, what: str, caught_by: str, *, steps: int, tokens_lost: int = 0) -> None:
        record_property("fault", (name, what, caught_by, str(steps), str(tokens_lost)))

    return record


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run that nothing happened to."""
    return straight_run(tmp_path_factory) / "straight"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table, of the tests that passed. A fault counts as caught when no test with its number has failed."""
    passed = [r for r in terminalreporter.getreports("passed") if r.when == "call"]
    rows = [value for r in passed for name, value in r.user_properties if name == "fault"]
    failed = [
        r.nodeid
        for outcome in ("failed", "error")
        for r in terminalreporter.getreports(outcome)
        if "tests/faults/" in r.nodeid
    ]
    if not rows and not failed:
        return
    numbers_failed = {int(number) for nodeid in failed for number in re.findall(r"(?<=_)\d+(?=_)", nodeid)}
    ran = {number_of(row) for row in rows} | numbers_failed
    caught = ran - numbers_failed
    table = [COLUMNS, *sorted(rows, key=lambda row: (number_of(row), row))]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    terminalreporter.section("faults")
    for row in table:
        terminalreporter.write_line("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    terminalreporter.write_line(f"caught {len(caught)}/{len(ran)} faults of this session, {NUM_FAULTS} there are")
    for nodeid in failed:
        terminalreporter.write_line(f"NOT CAUGHT: {nodeid}")


def number_of(row: tuple[str, ...]) -> int:
    return int("".join(filter(str.isdigit, row[0])))
