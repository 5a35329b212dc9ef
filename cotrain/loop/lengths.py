"""Predicts response lengths from earlier responses to the same prompt, so that the longest can begin first."""

import math
from collections.abc import Mapping, Sequence

NEWEST_WEIGHT = 0.5  # weight of a prompt's newest samples in its moving average: an older policy wrote the other ones


class LengthHistory:
    """A moving average of the log length for each prompt.

    The length of a truncated response is a lower bound. Averages are geometric means, the medians of log-normal lengths.
    """

    def __init__(self, logs: Mapping[str, float] | None = None) -> None:
        """logs: those of an earlier history to continue from."""
        self.logs = dict(logs or {})  # the average of each prompt
        self._overall: float | None = None  # the mean over prompts; None when it must be computed again

    def expected(self, prompt_id: str) -> float:
        """Expected response tokens for this prompt, or for any prompt if this one is new; 1 before the first observation."""
        if self._overall is None:  # math.fsum does not depend on the order in which groups were scored
            self._overall = math.fsum(self.logs.values()) / max(1, len(self.logs))
        return math.exp(self.logs.get(prompt_id, self._overall))

    def observe(self, prompt_id: str, lengths: Sequence[int], truncated: Sequence[bool]) -> None:
        """Learn from the lengths of a prompt's samples. If half of them are truncated, at least the longest is expected next."""
        known = self.logs.get(prompt_id)
        logs = [math.log(max(1, length)) for length in lengths]
        newest = sum(logs) / len(logs)
        average = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        self.logs[prompt_id] = max(average, max(logs)) if 2 * sum(truncated) >= len(logs) else average
        self._overall = None
