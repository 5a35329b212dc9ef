"""decisions.jsonl: what happened to the drafter, why, and by which numbers. One JSON object an event."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from cotrain.run.row_file import RowFile, read_rows

FILE = "decisions.jsonl"
"""In the folder of a run."""

Kind = Literal["published", "kept back", "refused", "rolled back", "kept", "alarm"]


@dataclass(frozen=True)
class DrafterEvent:
    """One decision."""

    step: int
    kind: Kind
    """published, kept back, refused: a candidate. rolled back, kept: a publication, by its canary. alarm: a step."""
    version: int
    """Of the drafter that the engines serve from the next step on."""
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_bad_news(self) -> bool:
        """Something that a person would want to read in full."""
        return self.kind in ("refused", "rolled back", "alarm")

    def in_short(self) -> str:
        """For the end of a step line; empty when the line shows it anyway."""
        if self.kind in ("published", "kept"):
            return ""
        return "drafter taken back" if self.kind == "rolled back" else f"drafter {self.reason.partition(':')[0]}"


class DecisionLog:
    """Appends events to a file that can be read at any time."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Keep the events up to `resumed_step` (0: none); later ones are replayed by the resumed run."""
        self.path = path
        self._file = RowFile(path, resumed_step)

    def write(self, event: DrafterEvent) -> None:
        row = {"step": event.step, "kind": event.kind, "version": event.version, "reason": event.reason}
        self._file.write(row | {"numbers": dict(event.numbers)})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """All events; none when there is no such file."""
    return read_rows(path) if path.is_file() else []
