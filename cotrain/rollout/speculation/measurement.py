"""How engine steps of all draft lengths are measured at the start of a run.

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


def measured_length(num_steps: int, max_speculative_tokens: int) -> int:
    """Draft length of the step that follows so many measured ones."""
    return max_speculative_tokens - num_steps // MEASURE_STEPS % (max_speculative_tokens + 1)


def next_size(rounds: Mapping[int, list[float]], seconds_left: float) -> int | None:
    """Batch size to measure next: the one that took the least time so far. None when there is nothing left to do.

    rounds: for each of measured_sizes, the seconds that each of its batches took.
    """
    left = [size for size, seconds in rounds.items() if len(seconds) < MEASURE_ROUNDS]
    return min(left, key=lambda size: sum(rounds[size])) if left and seconds_left > 0 else None


def room_for(max_speculative_tokens: int) -> int:
    """Tokens of a request that suffice to measure all draft lengths once, if every draft token were accepted."""
    return sum(MEASURE_STEPS * (k + 1) for k in range(max_speculative_tokens + 1))
