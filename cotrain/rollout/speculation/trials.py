"""Trials: now and then a few engine steps of a length that is not the chosen one, so that a wrong table is found out."""

from statistics import median

import numpy as np

from cotrain.rollout.speculation.step_costs import Array

TRIAL_STEPS = 8
"""Steps of a trial. The first verifies what the chosen length drafted, so that 7 are timed."""

LEAST_TIMED = 3
"""Timed steps of a trial that ended early, so that one late step does not decide."""

TRIAL_SHARE = 0.02
"""Share of the decoding time that trials take."""

WAIT_SECONDS = 1.0
"""Decoding time until something to try is searched for again where there was nothing."""


class Trials:
    """When a trial is due, which length it tries, and what came of it. Time is decoding time."""

    def __init__(self) -> None:
        self.num_speculative_tokens: int | None = None
        """Length on trial."""
        self._wait = self._cost = 0.0
        self._steps = self._number = 0
        self._errors: list[float] = []

    @property
    def due(self) -> bool:
        """Has the time come to begin one?"""
        return self.num_speculative_tokens is None and self._wait <= 0

    def begin(self, chosen: int, gains: Array, ratios: Array) -> None:
        """Try a length at which a drafter that is always right would gain more than the chosen one, if there is any.

        While speculation is on, no speculation comes every other time. While it is off, only the best of the others
        comes: all that can change is the drafter, and each trial costs. gains, ratios [K+1]: expected gain over no
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
        """A step has ended; is a trial over? error: log seconds above what the table says; None at a change of length."""
        if self.num_speculative_tokens is None:
            self._wait -= seconds
            return False
        self._steps += 1
        self._cost += seconds
        if error is not None:
            self._errors.append(error)
        return self._steps == TRIAL_STEPS

    def end(self) -> float | None:
        """End the trial. Its median error, which no late step moves; None with too few steps.

        The next is due when its share of the time has paid for this one.
        """
        errors, self._errors = self._errors, []
        self._wait = self._cost / TRIAL_SHARE
        self.num_speculative_tokens, self._steps, self._cost = None, 0, 0.0
        return median(errors) if len(errors) >= LEAST_TIMED else None
