"""How engine steps of all draft lengths are measured at the start of a run.

Batches of requests decode while the draft length goes from the longest down to 0 and starts again. So their prompts are
computed only once, and a slow moment of the machine hits all lengths alike.
"""

from collections.abc import Mapping

MEASURE_STEPS = 5
"""Successive steps of one draft length. The first still verifies drafts of the length before, so only 4 are timed."""

MEASURE_ROUNDS = 8
"""Most batches of requests that are measured for each batch size, if the time suffices."""


def measured_sizes(max_batch: int) -> list[int]:
    """Return max_batch, ..., 16, 4, 1. Speculation gains least in large batches, so if time runs out before the small ones are
    measured, the errors are on the safe side."""
    return [max_batch] + [4**i for i in reversed(range(max_batch.bit_length())) if 4**i < max_batch]


def measured_length(num_steps: int, max_speculative_tokens: int) -> int:
    """Return the draft length of the step that follows `num_steps` measured ones."""
    return max_speculative_tokens - num_steps // MEASURE_STEPS % (max_speculative_tokens + 1)


def next_size(rounds: Mapping[int, list[float]], seconds_left: float) -> int | None:
    """Return the batch size to measure next: the one that took the least time so far. None when nothing or no time is left.

    rounds: for each of measured_sizes, the seconds that each of its batches took.
    """
    left = [size for size, seconds in rounds.items() if len(seconds) < MEASURE_ROUNDS]
    return min(left, key=lambda size: sum(rounds[size])) if left and seconds_left > 0 else None


def room_for(max_speculative_tokens: int) -> int:
    """Return the number of tokens in which a request measures all draft lengths once if every draft token is accepted."""
    return sum(MEASURE_STEPS * (k + 1) for k in range(max_speculative_tokens + 1))
