"""Predicts response lengths from earlier responses to the same prompt, and measures what an order of prompts gains."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

NEWEST_WEIGHT = 0.5
"""Weight of a prompt's newest samples in its moving average: an older policy wrote the other ones."""

KEPT = 1024
"""Number of newest responses whose actual lengths are compared with the expected ones."""


class LengthHistory:
    """A moving average of the log length for each prompt, and how far actual lengths were from those expected by it.

    The length of a truncated response is a lower bound. Averages are geometric means, the medians of log-normal lengths.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._overall = 0.0
        # log(length / expected length) and whether the response was truncated, for prompts that had been seen before.
        self._errors = deque[tuple[float, bool]](maxlen=KEPT)

    def expected(self, prompt_id: str) -> float:
        """Expected response tokens for this prompt, or for any prompt if this one is new; 1 before the first observation."""
        return math.exp(self._logs.get(prompt_id, self._overall))

    def observe(self, prompt_id: str, lengths: Sequence[int], truncated: Sequence[bool]) -> None:
        """Learn from the lengths of a prompt's samples. If half of them are truncated, at least the longest is expected next."""
        known = self._logs.get(prompt_id)
        expected = math.log(self.expected(prompt_id))
        logs = [math.log(max(1, length)) for length in lengths]
        if known is not None:
            self._errors += [(log - expected, cut) for log, cut in zip(logs, truncated, strict=True)]
        newest = sum(logs) / len(logs)
        average = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        self._logs[prompt_id] = max(average, max(logs)) if 2 * sum(truncated) >= len(logs) else average
        self._overall = sum(self._logs.values()) / len(self._logs)

    @property
    def error(self) -> float | None:
        """Median absolute log error of the expected lengths, over responses to prompts seen before; None if there are none.

        A truncated response that was expected to be longer has error 0.
        """
        errors = [max(0.0, error) if cut else abs(error) for error, cut in self._errors]
        return float(np.median(errors)) if errors else None

    def metrics(self) -> dict[str, float]:
        """The error, if there is one."""
        return {} if self.error is None else {"rollout/length_error": self.error}

    def state(self) -> dict[str, Any]:
        """The history as values that JSON can hold, for a checkpoint."""
        return {"logs": dict(self._logs), "errors": [*map(list, self._errors)]}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._logs = dict(state["logs"])
        self._overall = sum(self._logs.values()) / max(1, len(self._logs))
        self._errors = deque([(error, cut) for error, cut in state["errors"]], maxlen=KEPT)


def order_speedup(lengths: dict[int, list[int]], begun: Sequence[int], num_engines: int, slots: int) -> float | None:
    """Makespan of a step's groups in the order drawn, over that in the order they began; None if all requests fit at once.

    lengths: response lengths by group number. begun: these numbers as the groups began. Nothing else runs, as without lag.
    """
    if sum(len(lengths[number]) for number in begun) <= num_engines * slots:
        return None
    drawn, chosen = ([lengths[number] for number in order] for order in (sorted(begun), begun))
    return makespan(drawn, num_engines, slots) / makespan(chosen, num_engines, slots)


def makespan(groups: Sequence[Sequence[int]], num_engines: int, slots: int) -> int:
    """Engine steps until the last request of these groups has ended. A group is the list of its response lengths [tokens].

    Each group goes to the engine with the fewest requests so far, and an engine runs its requests in order, `slots` at
    once. Every step takes the same time and emits one token for each request.
    """
    load, ends = Counter[int](), [[0] * slots for _ in range(num_engines)]
    for group in groups:
        engine = min(range(num_engines), key=load.__getitem__)
        load[engine] += len(group)
        for length in group:
            heapq.heappush(ends[engine], heapq.heappop(ends[engine]) + length)
    return max(map(max, ends))
