"""How engine steps of all draft lengths are measured at the start of a run.

Batches of requests decode while the draft length goes from the longest down to 0 and starts again. So their prompts are
computed only once, and a slow moment of the machine hits all lengths alike.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from cotrain.rollout.speculation.step_costs import QUANTILE

MEASURE_STEPS = 5
"""Successive steps of one draft length. The first still verifies drafts of the length before, so only 4 are timed."""

MEASURE_ROUNDS = 8
"""Most batches of requests that are measured for each batch size, if the time suffices."""


MEASURE_TRIES = 2
"""How many times the steps are measured at most, as long as they contradict each other."""

NOISE_ERRORS = 4.0
"""Standard errors by which steps with more draft tokens may be the faster ones before that is a contradiction: about three of a
quartile, whose noise is larger than that of the mean log seconds."""


def contradicts(measured: Mapping[tuple[int, int], Sequence[float]]) -> bool:
    """Whether, at some batch size, steps of a length took less time than those of a shorter one, by more than noise.

    measured: seconds of steps by (draft length, batch size).
    """
    known = {cell: np.log(seconds) for cell, seconds in measured.items() if len(seconds) > 1}
    found = {cell: (np.quantile(logs, QUANTILE), logs.var() / len(logs)) for cell, logs in known.items()}
    pairs = ((found[a], found[b]) for a in found for b in found if a[0] < b[0] and a[1] == b[1])
    return any(short - long > NOISE_ERRORS * (noise + more) ** 0.5 for (short, noise), (long, more) in pairs)


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
