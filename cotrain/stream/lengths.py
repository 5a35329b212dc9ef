"""How long the responses to a prompt will be, from those to it before; and what an order of prompts makes of that."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

NEWEST_WEIGHT = 0.5
"""Weight of a prompt's newest samples in its moving average: the policy that wrote the older ones has moved."""

KEPT = 1024
"""Newest responses whose lengths are compared with what had been expected of them."""

QUANTILES = (0.1, 0.5, 0.9)


class LengthHistory:
    """A moving average of log length for each prompt, and how far lengths have been from what it let expect.

    A truncated response counts as one that is at least as long. Averages are geometric means: medians of log-normal lengths.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._overall = 0.0
        # Log of length over expected length and whether it was truncated, of prompts that had been seen before.
        self._errors = deque[tuple[float, bool]](maxlen=KEPT)
        self._inside = deque[bool](maxlen=KEPT)

    def expected(self, prompt_id: str) -> float:
        """Tokens of a response to this prompt; of one to any prompt where this one has not been seen. 1 before all."""
        return math.exp(self._logs.get(prompt_id, self._overall))

    def remaining(self, prompt_id: str, generated: int) -> tuple[float, ...] | None:
        """QUANTILES of the tokens still to come of a response that has so many, as if none were ever truncated.

        Past responses tell how lengths scatter around what is expected: where some of them were truncated, their quantiles are
        those of Kaplan and Meier, and where too many were, the result is a lower bound. None where no response was that long.
        """
        expected = self.expected(prompt_id)
        longer = sorted((n, cut) for error, cut in self._errors if (n := expected * math.exp(error)) > generated)
        if not longer:
            return None
        lengths, cut = np.array(longer).T
        survive = np.cumprod(1 - (1 - cut) / np.arange(len(longer), 0, -1))
        first = [np.argmax(np.append(survive, 0) < 1 - q + 1e-9) for q in QUANTILES]
        return tuple(float(lengths[min(i, len(longer) - 1)]) - generated for i in first)

    def observe(self, prompt_id: str, lengths: Sequence[int], truncated: Sequence[bool]) -> None:
        """Learn the lengths of a prompt's samples. With half of them truncated, the expected length is at least the longest."""
        known, usual = self._logs.get(prompt_id), self.remaining(prompt_id, 0)
        expected = math.log(self.expected(prompt_id))
        logs = [math.log(max(1, length)) for length in lengths]
        if known is not None:
            self._errors += [(log - expected, cut) for log, cut in zip(logs, truncated, strict=True)]
        if known is not None and usual is not None:
            low, *_, high = usual
            self._inside += [n <= high and (cut or n >= low) for n, cut in zip(lengths, truncated, strict=True)]
        newest = sum(logs) / len(logs)
        average = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        self._logs[prompt_id] = max(average, max(logs)) if 2 * sum(truncated) >= len(logs) else average
        self._overall = sum(self._logs.values()) / len(self._logs)

    @property
    def error(self) -> float | None:
        """Median absolute log error of what was expected of responses to prompts seen before; None where none came.

        A truncated response that was expected to be longer is no error.
        """
        errors = [max(0.0, error) if cut else abs(error) for error, cut in self._errors]
        return float(np.median(errors)) if errors else None

    def metrics(self) -> dict[str, float]:
        """The error, and the share of responses between the lowest and the highest of QUANTILES, of which 0.8 should be."""
        found = {"rollout/length_error": self.error}
        found["rollout/length_in_range"] = sum(self._inside) / len(self._inside) if self._inside else None
        return {name: value for name, value in found.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"logs": dict(self._logs), "errors": [*map(list, self._errors)], "inside": list(self._inside)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self._logs = dict(state["logs"])
        self._overall = sum(self._logs.values()) / max(1, len(self._logs))
        self._errors = deque([(error, cut) for error, cut in state["errors"]], maxlen=KEPT)
        self._inside = deque(state["inside"], maxlen=KEPT)


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
