"""What decisions.jsonl holds of a decision on the drafter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["published", "kept back", "refused", "rolled back", "kept", "alarm"]


@dataclass(frozen=True)
class DrafterEvent:
    step: int
    kind: Kind
    """A candidate is published, kept back or refused; the canary rolls it back or keeps it; a step raises an alarm."""
    version: int  # the drafter that the engines serve from the next step on
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_bad_news(self) -> bool:
        """Whether a person would want to read it in full."""
        return self.kind in ("refused", "rolled back", "alarm")

    def in_short(self) -> str:
        """Return the event in short for the end of a step line; empty if the line shows it anyway."""
        if self.kind in ("published", "kept"):
            return ""
        return "drafter rolled back" if self.kind == "rolled back" else f"drafter {self.reason.partition(':')[0]}"
