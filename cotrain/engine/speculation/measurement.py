"""How engine steps of all draft lengths are measured at the start of a run.

Batches of requests decode while the draft length goes from the longest down to 0 and starts again. So their prompts are
computed only once, and a slow moment of the machine hits all lengths alike.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from cotrain.engine.speculation.step_costs import QUANTILE

MEASURE_STEPS = 5
"""Successive steps of one draft length. The first still verifies drafts of the length before, so only 4 are timed."""

MEASURE_ROUNDS = 8
"""Most batches of requests that are measured for each batch size, if the time suffices."""

MEASURE_TRIES = 2
"""How many times the steps are measured at most, as long as they contradict each other."""

LIVE_STEPS = 12
"""Timed steps of each draft length that a batch size needs before a choice rests on them, where live requests are timed: three
turns of MEASURE_STEPS, with 4 timed steps each."""

NOISE_ERRORS = 4.0
"""Standard errors by which steps with more draft tokens may be the faster ones before that is a contradiction: about three of a
quartile, whose noise is larger than that of the mean log seconds."""


class Measurement:
    """Seconds of the engine steps of one proposer, while all draft lengths take turns."""

    def __init__(self, proposer: str, max_speculative_tokens: int, max_batch: int, live: bool):
        """live: time batches of any size, until `is_complete`, instead of only those of `measured_sizes`."""
        self.proposer, self.live, self._num_steps = proposer, live, 0
        self._longest, self._sizes = max_speculative_tokens, measured_sizes(max_batch)
        self._seconds: dict[tuple[int, int], list[float]] = {}

    @property
    def length(self) -> int:
        """Draft length of the next step."""
        return self._longest - self._num_steps // MEASURE_STEPS % (self._longest + 1)

    def observe(self, num_speculative_tokens: int, batch: int, steady: bool, seconds: float) -> None:
        """Count a step without prompts. Its time is that of a draft length only if it is steady, see controller.Step."""
        self._num_steps += 1
        if steady and (self.live or batch in self._sizes):
            self._seconds.setdefault((num_speculative_tokens, batch), []).append(seconds)

    @property
    def is_complete(self) -> bool:
        """Whether LIVE_STEPS steps of each draft length were timed at some batch size, or twice as many if steps contradict
        each other."""
        lengths, known = range(self._longest + 1), self._seconds
        fewest = max((min(len(known.get((k, b), ())) for k in lengths) for k0, b in known if not k0), default=0)
        return fewest >= MEASURE_TRIES * LIVE_STEPS or (fewest >= LIVE_STEPS and not contradicts(known))

    def seconds(self) -> dict[tuple[int, int], list[float]]:
        """Return the seconds of steps by (draft length, batch size); of live requests, those of which there are enough."""
        return {cell: times for cell, times in self._seconds.items() if not self.live or len(times) >= LIVE_STEPS}


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


def room_for(max_speculative_tokens: int) -> int:
    """Return the number of tokens in which a request measures all draft lengths once if every draft token is accepted."""
    return sum(MEASURE_STEPS * (k + 1) for k in range(max_speculative_tokens + 1))
