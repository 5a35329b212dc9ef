"""Predicts response lengths from earlier responses to the same prompt, so that the longest can begin first."""

import math
from collections.abc import Sequence
from typing import Any

NEWEST_WEIGHT = 0.5  # weight of a prompt's newest samples in its moving average: an older policy wrote the other ones


class LengthHistory:
    """A moving average of the log length for each prompt.

    The length of a truncated response is a lower bound. Averages are geometric means, the medians of log-normal lengths.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._overall: float | None = 0.0  # the mean over prompts; None when it must be computed again

    def expected(self, prompt_id: str) -> float:
        """Expected response tokens for this prompt, or for any prompt if this one is new; 1 before the first observation."""
        if self._overall is None:  # math.fsum does not depend on the order in which groups were scored
            self._overall = math.fsum(self._logs.values()) / max(1, len(self._logs))
        return math.exp(self._logs.get(prompt_id, self._overall))

    def observe(self, prompt_id: str, lengths: Sequence[int], truncated: Sequence[bool]) -> None:
        """Learn from the lengths of a prompt's samples. If half of them are truncated, at least the longest is expected next."""
        known = self._logs.get(prompt_id)
        logs = [math.log(max(1, length)) for length in lengths]
        newest = sum(logs) / len(logs)
        average = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        self._logs[prompt_id] = max(average, max(logs)) if 2 * sum(truncated) >= len(logs) else average
        self._overall = None

    def state(self) -> dict[str, Any]:
        """The history as values that JSON can hold, for a checkpoint."""
        return {"logs": dict(self._logs)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._logs, self._overall = dict(state["logs"]), None
