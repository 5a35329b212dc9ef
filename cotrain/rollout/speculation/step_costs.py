"""Seconds of an engine step by draft length and batch size: measured at the start, corrected by trials.

For a given acceptance, whether speculation pays depends only on the ratio t_k / t_0, and a busy neighbour slows all steps
alike. So the steps of the length in use only tell how fast the machine is at the moment, its `pace`. A trial, a few steps of
another length in between, tells how far the table's ratio is off.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

QUANTILE = 0.25
"""Quantile of the measured times that is used, since disturbances of a machine only make steps slower, and come in bursts."""

PACE_STEPS, LEAST_PACE_STEPS = 15, 5
"""Number of latest steps whose median is the pace, and how many of them a trial needs to be compared with. Single slow steps do
not move the median, and it follows a busy spell within eight."""

TRIAL_WEIGHT = 0.25
"""Share of a trial's error by which the table is corrected, because a trial's noise is about as large as the table's error."""

TRIAL_STEPS = 8
"""Steps of a trial. The first verifies drafts of the chosen length, so only 7 are timed."""

LEAST_TIMED = 3
"""Fewest timed steps of a trial that ended early for it to count, so that one slow step does not decide."""

TRIAL_SHARE = 0.02
"""Share of the decoding time that trials take."""

WAIT_SECONDS = 1.0
"""Decoding time until the next search for a length to try, when the last one found none."""


def rising(table: Array, weights: Array | None = None) -> Array:
    """Return the closest table [K+1, n] whose columns never fall, by weighted least squares (isotonic regression)."""
    weights = np.ones_like(table) if weights is None else weights
    sums, total = (np.concatenate([0 * table[:1], part.cumsum(0)]) for part in (weights * table, weights))
    rows = range(len(table))

    def mean(first: int, last: int) -> Array:
        return (sums[last + 1] - sums[first]) / (total[last + 1] - total[first])

    lowest = [[np.min([mean(i, j) for j in rows[k:]], axis=0) for i in rows[: k + 1]] for k in rows]
    return np.stack([np.max(means, axis=0) for means in lowest])


class StepCosts:
    """Log seconds for draft lengths 0 to K at batch sizes 1 to max_batch, linear in log batch between measured ones.

    A step with more draft tokens computes more, so where it was faster that was noise, and the table does not show it: t_k / t_0
    never falls, and no step gains more than the tokens that it emits.
    """

    def __init__(
        self, max_speculative_tokens: int, max_batch: int, measured: Mapping[tuple[int, int], Sequence[float]]
    ):
        """measured: (draft length, batch size) -> seconds of steps. Batch sizes without all draft lengths are left out.

        Raises ValueError when that leaves none.
        """
        lengths = range(max_speculative_tokens + 1)
        sizes = sorted({batch for _, batch in measured if all(measured.get((k, batch)) for k in lengths)})
        if not sizes:
            raise ValueError("no batch size at which engine steps of all draft lengths were measured")
        self._log_batches = np.log2(np.arange(1, max_batch + 1))
        rows = ([np.log(np.quantile(measured[k, batch], QUANTILE)) for batch in sizes] for k in lengths)
        self._log_seconds = rising(np.stack([np.interp(self._log_batches, np.log2(sizes), row) for row in rows]))
        self._log_passes = np.zeros_like(self._log_seconds)
        self._first_draft = np.zeros(max_batch)
        self._recent: deque[float] = deque([0.0], maxlen=PACE_STEPS)

    def set_verification(self, verification: "StepCosts") -> None:
        """Take the ratios of steps in which the drafter does not run from costs that were measured in such steps."""
        self._log_passes = np.maximum(0.0, np.log(self.ratios() / verification.ratios()))

    def set_first_draft(self, of_one: "StepCosts") -> None:
        """Learn what a batch pays as soon as any of its requests drafts, from steps in which only one of them drafts a token.

        When a share x of them drafts one token, a step takes 1 + f + x (t_1 / t_0 - 1 - f) times t_0; f is 0 to t_1 / t_0 - 1.
        """
        share, most = 1 / np.arange(1, self._first_draft.size + 1), self.ratios(False)[1] - 1
        found = (of_one.ratios()[1] - 1 - share * most)[1:] / (1 - share[1:])
        self._first_draft[1:] = np.clip(found, 0.0, np.maximum(0.0, most[1:]))

    def first_draft(self, batch: int) -> float:
        """Return what the first draft of a batch adds to the time of its step, as a multiple of t_0."""
        return float(self._first_draft[batch - 1])

    def ratios(self, has_passes: bool = True) -> Array:
        """Return t_k / t_0, [K+1, max_batch], of steps in which the drafter runs or does not."""
        passes = 0.0 if has_passes else self._log_passes
        return np.exp(np.maximum.accumulate(self._log_seconds - passes) - self._log_seconds[0])

    def seconds(self, num_speculative_tokens: float, batch: int, has_passes: bool = True) -> float:
        """Return the time of a step at the present pace. The draft length may be a mean over requests."""
        return float(np.exp(self._of_table(num_speculative_tokens, batch, has_passes) + median(self._recent)))

    def _of_table(self, num_speculative_tokens: float, batch: int, has_passes: bool) -> float:
        passes = 0.0 if has_passes else self._log_passes[:, batch - 1]
        column = np.maximum.accumulate(self._log_seconds[:, batch - 1] - passes)
        if not 0 < num_speculative_tokens < 1:
            return float(np.interp(num_speculative_tokens, np.arange(len(column)), column))
        most = np.exp(column[1] - column[0]) - 1
        of_passes = most + 1 - np.exp(column[1] - column[0] + (passes - self._log_passes[:, batch - 1])[1])
        least = of_passes + self.first_draft(batch)
        return float(column[0] + np.log1p(least + num_speculative_tokens * (most - least)))

    @property
    def knows_pace(self) -> bool:
        """Whether there have been enough steps since `pause`."""
        return len(self._recent) >= LEAST_PACE_STEPS

    def pause(self) -> None:
        """Forget the latest steps and keep only their pace, since the machine may be busier when the next steps come."""
        self._recent = deque([median(self._recent)], maxlen=PACE_STEPS)

    def follow(self, num_speculative_tokens: float, batch: int, seconds: float, has_passes: bool = True) -> None:
        """Learn the pace from a step of the length in use."""
        self._recent.append(float(np.log(seconds)) - self._of_table(num_speculative_tokens, batch, has_passes))

    def correct(self, num_speculative_tokens: int, batch: int, error: float) -> None:
        """Learn from a trial whose steps took exp(error) times `seconds`, also for batch sizes up to half and twice as large."""
        near = np.maximum(0.0, 1.0 - np.abs(self._log_batches - self._log_batches[batch - 1]))
        self._log_seconds[num_speculative_tokens] += TRIAL_WEIGHT * error * near
        self._log_seconds = rising(self._log_seconds)


class Trials:
    """Tries a few engine steps of another length than the chosen one now and then, so that errors of the table are noticed.

    All times are decoding time.
    """

    def __init__(self) -> None:
        self.num_speculative_tokens: int | None = None
        """Draft length on trial; None between trials."""
        self._wait = self._cost = 0.0
        self._steps = self._number = 0
        self._errors: list[float] = []

    @property
    def due(self) -> bool:
        return self.num_speculative_tokens is None and self._wait <= 0

    def begin(self, chosen: int, gains: Array, ratios: Array) -> None:
        """Try a length at which a drafter that is always right would gain more than the chosen one, if there is any.

        While speculation is on, every other trial is one without speculation. While it is off, only the best length is tried,
        because only the drafter can have changed, and each trial costs time. gains, ratios [K+1]: expected gain over no
        speculation, and t_k / t_0, at the present batch size.
        """
        could_pay = np.arange(1, len(gains) + 1) / ratios > gains[chosen]
        lengths: list[int] = [k for k in np.flatnonzero(could_pay).tolist() if k not in (0, chosen)]
        if chosen:
            lengths = [length for k in lengths for length in (0, k)] or [0]
        else:
            lengths = sorted(lengths, key=lambda k: -gains[k])[:1]
        if lengths:
            self.num_speculative_tokens = lengths[self._number % len(lengths)]
            self._number += 1
        else:
            self._wait = WAIT_SECONDS

    def observe(self, seconds: float, error: float | None) -> bool:
        """Count a step. Returns whether a trial is over. error: log seconds above the table's; None at a change of length."""
        if self.num_speculative_tokens is None:
            self._wait -= seconds
            return False
        self._steps += 1
        self._cost += seconds
        if error is not None:
            self._errors.append(error)
        return self._steps == TRIAL_STEPS

    def end(self) -> float | None:
        """End the trial. Returns its median error, which no single slow step moves, or None with too few steps.

        The next trial is due after so much decoding time that this one took TRIAL_SHARE of it.
        """
        errors, self._errors = self._errors, []
        self._wait = self._cost / TRIAL_SHARE
        self.num_speculative_tokens, self._steps, self._cost = None, 0, 0.0
        return median(errors) if len(errors) >= LEAST_TIMED else None
