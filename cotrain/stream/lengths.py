"""How long the responses to a prompt will be, from those to it before; and what an order of prompts makes of that."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import Any

NEWEST_WEIGHT = 0.5
"""Weight of a prompt's newest samples in its moving average: the policy that wrote the older ones has moved."""

KEPT = 1024
"""Newest responses whose lengths are compared with what had been expected of them."""


class LengthHistory:
    """A moving average of log length for each prompt, and how far lengths have been from what it let expect.

    A truncated response counts as one that is at least as long. Averages are geometric means: medians of log-normal lengths.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._overall = 0.0
        self._errors = deque[float](maxlen=KEPT)  # absolute, of responses to prompts seen before

    def expected(self, prompt_id: str) -> float:
        """Tokens of a response to this prompt; of one to any prompt where this one has not been seen. 1 before all."""
        return math.exp(self._logs.get(prompt_id, self._overall))

    def observe(self, prompt_id: str, lengths: Sequence[int], truncated: Sequence[bool]) -> None:
        """Learn the lengths of a prompt's samples. With half of them truncated, the expected length is at least the longest."""
        known = self._logs.get(prompt_id)
        logs = [math.log(max(1, length)) for length in lengths]
        if known is not None:  # a truncated response that was expected to be longer is no error
            off = [log - known for log in logs]
            self._errors += [max(0.0, e) if cut else abs(e) for e, cut in zip(off, truncated, strict=True)]
        newest = sum(logs) / len(logs)
        average = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        self._logs[prompt_id] = max(average, max(logs)) if 2 * sum(truncated) >= len(logs) else average
        self._overall = sum(self._logs.values()) / len(self._logs)

    @property
    def error(self) -> float | None:
        """Median absolute log error of what was expected of responses to prompts seen before; None where none came."""
        return median(self._errors) if self._errors else None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"logs": dict(self._logs), "errors": list(self._errors)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self._logs = dict(state["logs"])
        self._overall = sum(self._logs.values()) / max(1, len(self._logs))
        self._errors = deque(state["errors"], maxlen=KEPT)


def order_speedup(lengths: dict[int, list[int]], begun: Sequence[int], num_engines: int, slots: int) -> float | None:
    """Makespan of a step's groups in the order drawn, over that in the order in which they began; None if nothing queues.

    lengths: those of each group, by number; begun: their numbers. The groups have the engines for themselves, as without lag.
    """
    if sum(len(lengths[number]) for number in begun) <= num_engines * slots:
        return None
    drawn, chosen = ([lengths[number] for number in order] for order in (sorted(begun), begun))
    return makespan(drawn, num_engines, slots) / makespan(chosen, num_engines, slots)


def makespan(groups: Sequence[Sequence[int]], num_engines: int, slots: int) -> int:
    """Steps until the last request of these groups has ended.

    A group goes to the engine with the fewest requests so far, and an engine runs its requests in order, as many at once
    as it has slots. All steps take the same time.
    """
    load, ends = Counter[int](), [[0] * slots for _ in range(num_engines)]
    for group in groups:
        engine = min(range(num_engines), key=load.__getitem__)
        load[engine] += len(group)
        for length in group:
            heapq.heappush(ends[engine], heapq.heappop(ends[engine]) + length)
    return max(map(max, ends))
