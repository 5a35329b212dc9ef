"""How long the responses to a prompt will be, from those to it before; and what an order of prompts makes of that."""

import heapq
import math
from collections import Counter
from collections.abc import Sequence

NEWEST_WEIGHT = 0.5
"""Weight of a prompt's newest samples in its moving average: the policy that wrote the older ones has moved."""


class LengthHistory:
    """A moving average of log length for each prompt."""

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}

    def expected(self, prompt_id: str) -> float:
        """Tokens of a response to this prompt; of one to any prompt where this one has not been seen. 1 before all."""
        logs = self._logs
        return math.exp(logs.get(prompt_id, sum(logs.values()) / max(1, len(logs))))

    def observe(self, prompt_id: str, lengths: Sequence[int], truncated: Sequence[bool]) -> float | None:
        """Learn the lengths of a prompt's samples. Returns the log of their mean over what was expected of this prompt.

        A truncated sample would have been longer than it is, so that it never lowers what is expected. The result is
        None for a prompt that had not been seen.
        """
        known = self._logs.get(prompt_id)
        logs = [math.log(max(1, length)) for length in lengths]
        if known is not None:
            logs = [max(log, known) if cut else log for log, cut in zip(logs, truncated, strict=True)]
        newest = sum(logs) / len(logs)
        self._logs[prompt_id] = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        return None if known is None else math.log(max(1.0, sum(lengths) / len(lengths))) - known

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return dict(self._logs)

    def load(self, state: dict[str, float]) -> None:
        """Go on from a `state`."""
        self._logs = dict(state)


class OrderReport:
    """What longest first was worth in a step, by the lengths that came out."""

    def __init__(self) -> None:
        self._errors: list[float] = []
        self._lengths: dict[int, list[int]] = {}

    def add(self, number: int, lengths: list[int], error: float | None) -> None:
        """A group has finished. error: see LengthHistory.observe."""
        self._lengths[number] = lengths
        self._errors += [] if error is None else [abs(error)]

    def metrics(self, order: Sequence[int], num_engines: int, slots: int) -> dict[str, float]:
        """Of the groups that have finished since the last call. order: the groups as they were begun.

        rollout/length_error: mean absolute log error of a prompt's mean length. rollout/order_speedup: makespan of these
        lengths in the order that was drawn, over that in the order in which they began, where requests queue at all.
        """
        found: dict[str, float] = {}
        if self._errors:
            found["rollout/length_error"] = sum(self._errors) / len(self._errors)
        begun = [number for number in dict.fromkeys(order) if number in self._lengths]
        if sum(len(self._lengths[number]) for number in begun) > num_engines * slots:
            drawn, chosen = (
                makespan([self._lengths[number] for number in numbers], num_engines, slots)
                for numbers in (sorted(begun), begun)
            )
            found["rollout/order_speedup"] = drawn / chosen
        self._errors, self._lengths = [], {}
        return found


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
