"""How engine steps of all draft lengths are measured at the start of a run.

Batches of requests decode while the draft length goes from the longest down to 0 and starts again. So their prompts are
computed only once, and a slow moment of the machine hits all lengths alike.
"""

MEASURE_STEPS = 5
"""Successive steps of one draft length. The first still verifies drafts of the length before, so only 4 are timed."""

MEASURE_ROUNDS = 8
"""Most batches of requests that are measured for each batch size, if the time suffices."""

LIVE_STEPS = 12
"""Timed steps of each draft length that a batch size needs before a choice rests on them, where live requests are timed: three
turns of MEASURE_STEPS, with 4 timed steps each."""


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
        """Count a step without prompts. Its time is that of a draft length only if it is steady, see draft_length.Step."""
        self._num_steps += 1
        if steady and (self.live or batch in self._sizes):
            self._seconds.setdefault((num_speculative_tokens, batch), []).append(seconds)

    @property
    def is_complete(self) -> bool:
        """Whether LIVE_STEPS steps of each draft length were timed at some batch size."""
        lengths, times = range(self._longest + 1), self._seconds
        return any(all(len(times.get((k, b), ())) >= LIVE_STEPS for k in lengths) for k0, b in times if not k0)

    def seconds(self) -> dict[tuple[int, int], list[float]]:
        """Return the seconds of steps by (draft length, batch size); of live requests, those of which there are enough."""
        return {cell: times for cell, times in self._seconds.items() if not self.live or len(times) >= LIVE_STEPS}


def measured_sizes(max_batch: int) -> list[int]:
    """Return max_batch, ..., 16, 4, 1. Speculation gains least in large batches, so if time runs out before the small ones are
    measured, the errors are on the safe side."""
    return [max_batch] + [4**i for i in reversed(range(max_batch.bit_length())) if 4**i < max_batch]


def room_for(max_speculative_tokens: int) -> int:
    """Return the number of tokens in which a request measures all draft lengths once if every draft token is accepted."""
    return sum(MEASURE_STEPS * (k + 1) for k in range(max_speculative_tokens + 1))
