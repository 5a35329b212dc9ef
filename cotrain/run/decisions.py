"""decisions.jsonl: what happened to the drafter, why, and by which numbers. One JSON object an event."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from cotrain.run.row_file import RowFile, read_rows

FILE = "decisions.jsonl"
"""In the folder of a run."""

Kind = Literal["published", "kept back", "refused", "rolled back", "kept", "alarm"]


@dataclass(frozen=True)
class DrafterEvent:
    """One decision."""

    step: int
    kind: Kind
    """A candidate is published, kept back or refused; a publication is rolled back or kept by its canary; a step raises
    an alarm."""
    version: int
    """The drafter that the engines serve from the next step on."""
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_bad_news(self) -> bool:
        """Whether a person would want to read it in full."""
        return self.kind in ("refused", "rolled back", "alarm")

    def in_short(self) -> str:
        """For the end of a step line; empty when the line shows it anyway."""
        if self.kind in ("published", "kept"):
            return ""
        return "drafter taken back" if self.kind == "rolled back" else f"drafter {self.reason.partition(':')[0]}"


class DecisionLog(AbstractContextManager["DecisionLog"]):
    """Appends events to a file that can be read at any time."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Keep the events up to `resumed_step` (0: none); later ones are replayed by the resumed run."""
        self.path = path
        self._file = RowFile(path, resumed_step)

    def write(self, event: DrafterEvent) -> None:
        """Append one event; numbers that are not finite are left out."""
        finite = {name: value for name, value in event.numbers.items() if isfinite(value)}
        self._file.write(asdict(replace(event, numbers=finite)))

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """All events; none when there is no such file."""
    return read_rows(path) if path.is_file() else []
