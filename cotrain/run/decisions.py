"""What happened to the drafter, why, and by which numbers: the rows of decisions.jsonl."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["published", "kept back", "refused", "rolled back", "kept", "alarm"]


@dataclass(frozen=True)
class DrafterEvent:
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
