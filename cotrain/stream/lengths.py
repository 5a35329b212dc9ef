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

QUANTILES = (0.1, 0.5, 0.9)


class LengthHistory:
    """A moving average of the log length for each prompt, and how far actual lengths were from those expected by it.

    The length of a truncated response is a lower bound. Averages are geometric means, the medians of log-normal lengths.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._overall = 0.0
        # log(length / expected length) and whether the response was truncated, for prompts that had been seen before.
        self._errors = deque[tuple[float, bool]](maxlen=KEPT)
        self._inside = deque[bool](maxlen=KEPT)

    def expected(self, prompt_id: str) -> float:
        """Expected response tokens for this prompt, or for any prompt if this one is new; 1 before the first observation."""
        return math.exp(self._logs.get(prompt_id, self._overall))

    def remaining(self, prompt_id: str, generated: int) -> tuple[float, ...] | None:
        """QUANTILES of the tokens still to come in a response that has `generated` tokens, as if none were ever truncated.

        They come from how past lengths scattered around the expected ones: as Kaplan-Meier quantiles if some responses were
        truncated, and as lower bounds if too many were. None if no past response, scaled to this prompt, was longer.
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
        """Learn from the lengths of a prompt's samples. If half of them are truncated, at least the longest is expected next."""
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
        """Median absolute log error of the expected lengths, over responses to prompts seen before; None if there are none.

        A truncated response that was expected to be longer has error 0.
        """
        errors = [max(0.0, error) if cut else abs(error) for error, cut in self._errors]
        return float(np.median(errors)) if errors else None

    def metrics(self) -> dict[str, float]:
        """The error, and the share of responses between the lowest and the highest of QUANTILES, which should be 0.8."""
        found = {"rollout/length_error": self.error}
        found["rollout/length_in_range"] = sum(self._inside) / len(self._inside) if self._inside else None
        return {name: value for name, value in found.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """The history as values that JSON can hold, for a checkpoint."""
        return {"logs": dict(self._logs), "errors": [*map(list, self._errors)], "inside": list(self._inside)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._logs = dict(state["logs"])
        self._overall = sum(self._logs.values()) / max(1, len(self._logs))
        self._errors = deque([(error, cut) for error, cut in state["errors"]], maxlen=KEPT)
        self._inside = deque(state["inside"], maxlen=KEPT)


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
