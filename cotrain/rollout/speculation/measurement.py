"""Measures engine steps of all draft lengths at the start of a run.

Batches of requests decode while the draft length goes from the longest to 0 and begins again, so that their prompts are
computed once, and a slow moment of the machine hits all lengths alike.
"""

from collections.abc import Mapping

MEASURE_STEPS = 5
"""Steps of one length in a row. The first still verifies what the length before drafted, so that 4 are timed."""

MEASURE_ROUNDS = 8
"""Batches of requests of one size, if the time suffices."""


def measured_sizes(max_batch: int) -> list[int]:
    """max_batch, ..., 16, 4, 1: speculation gains least in large batches, so where the time is up early, errors are
    on the safe side."""
    return [max_batch] + [4**i for i in reversed(range(max_batch.bit_length())) if 4**i < max_batch]


def next_size(rounds: Mapping[int, list[float]], seconds_left: float) -> int | None:
    """Batch size to measure next: the one that took the least time so far. None when there is nothing left to do.

    rounds: for each of measured_sizes, the seconds that each of its batches took.
    """
    left = [size for size, seconds in rounds.items() if len(seconds) < MEASURE_ROUNDS]
    return min(left, key=lambda size: sum(rounds[size])) if left and seconds_left > 0 else None


def room_for(max_speculative_tokens: int) -> int:
    """Tokens of a request that suffice to measure all draft lengths once, if every draft token were accepted."""
    return sum(MEASURE_STEPS * (k + 1) for k in range(max_speculative_tokens + 1))


class Measurement:
    """What the speculation controller does while steps are measured."""

    def __init__(self, max_speculative_tokens: int, max_batch: int):
        self._max_speculative_tokens, self._sizes = max_speculative_tokens, measured_sizes(max_batch)
        self._num_steps = 0
        self.seconds: dict[tuple[int, int], list[float]] = {}
        """(draft length, batch size) -> of each step in which all requests verified and drafted so many tokens."""

    @property
    def num_speculative_tokens(self) -> int:
        """Draft length of the next step."""
        return self._max_speculative_tokens - self._num_steps // MEASURE_STEPS % (self._max_speculative_tokens + 1)

    def observe(self, num_speculative_tokens: int, batch: int, steady: bool, seconds: float) -> None:
        """Count a step that computed no prompt."""
        self._num_steps += 1
        if steady and batch in self._sizes:
            self.seconds.setdefault((num_speculative_tokens, batch), []).append(seconds)
