"""One check of `cotrain doctor`, and how it becomes pass, fail or not applicable."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "not applicable"]


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    found: str
    remedy: str
    """What to do about a failure, in a sentence; empty for all others."""
    seconds: float


class Problem(Exception):
    """What a check has found wrong."""


class NotApplicable(Exception):
    """Why a check is skipped: the machine lacks what would be checked, or something that the check needs has failed."""


def run_check(name: str, function: Callable[[], str], remedy: str) -> Check:
    """Run one check, a function that returns what it found.

    Any exception but NotApplicable counts as a failure of this check, so that all other checks are still made.
    """
    started = time.perf_counter()
    status: Status = "pass"
    try:
        found = function()
    except NotApplicable as reason:
        status, found = "not applicable", str(reason)
    except Exception as error:
        status, found = "fail", str(error) or type(error).__name__
    seconds = round(time.perf_counter() - started, 1)
    return Check(name, status, found, remedy if status == "fail" else "", seconds)
