"""Which draft length a batch size gets, and what is worth a trial. Pure functions of gains and their uncertainty.

The gain of length k over no speculation is L_k / (t_k / t_0), here in logs, with 0 at k = 0. Its lower bound decides
whether a length comes into use: no speculation is what the user would have without us, so the burden of proof is on the
other side. Among those that may, the estimate decides: their errors are mostly shared, and a bound would favour the
length that happens to be known best. A length comes into use when its bound exceeds 0, and takes another's place when
its estimate exceeds the other's, by the hysteresis; it goes out of use at once when its estimate says that it costs.
Were that left to the bound too, speculation would come to rest where it is off: little is learnt there, by trials
alone, so that one busy second would cost minutes of what it gains.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Gains:
    """Log gain over no speculation, [K+1, max_batch]; row 0 is zero."""

    estimate: Array
    lower: Array
    upper: Array
    ceiling: Array
    """Upper bound of what a drafter that is always right would gain."""


def gains(lengths: tuple[Array, Array], seconds: Array, ratio_error: Array, z: float) -> Gains:
    """From tokens per step and their relative error, step times, and the error of log t_k / t_0, all [K+1, max_batch]."""
    tokens, tokens_error = lengths
    log_ratio = np.log(seconds / seconds[0])
    estimate = np.log(tokens) - log_ratio
    width = z * np.hypot(tokens_error, ratio_error)
    full = np.log(np.arange(1, len(tokens) + 1))[:, None]
    return Gains(estimate, estimate - width, estimate + width, full - log_ratio + z * ratio_error)


def choose(current: Lengths, gain: Gains, hysteresis: float) -> Lengths:
    """Draft length of each batch size, [max_batch], given the present ones."""
    batches = np.arange(len(current))
    allowed = gain.lower > hysteresis
    allowed[current, batches] = gain.estimate[current, batches] >= 0
    allowed[0] = True
    best = np.where(allowed, gain.estimate, -np.inf).argmax(0)
    better = gain.estimate[best, batches] > gain.estimate[current, batches] + hysteresis
    return np.where(better | ~allowed[current, batches], best, current)


def undecided(gain: Gains, hysteresis: float) -> list[list[int]]:
    """For each batch size the lengths that more timings would tell apart; empty where the best one stands out.

    Those are the lengths of the highest estimate, those whose upper bound reaches above it, and 0 to measure by. 0 is
    in doubt itself while the best length's lower bound does not clear the hysteresis.
    """
    result = []
    for lower, estimate, upper in zip(gain.lower.T, gain.estimate.T, gain.upper.T, strict=True):
        best = int(estimate[1:].argmax()) + 1
        rivals = {k for k in range(1, len(upper)) if k != best and upper[k] > estimate[best] and upper[k] > 0}
        doubtful = bool(rivals) or lower[best] <= hysteresis
        result.append(sorted({0, best, *rivals}) if doubtful and upper[best] > 0 else [])
    return result


def trial_lengths(chosen: Lengths, gain: Gains, last_trial: Lengths) -> Lengths:
    """Length to try next at each batch size, [max_batch]; -1 where nothing is worth a trial.

    Off: the length of the highest upper bound among those that a perfect drafter would make pay. On: no speculation
    (the check of the gain) and lengths that might be better, the longest untried first. last_trial [K+1, max_batch]:
    when each was last tried.
    """
    batches = np.arange(len(chosen))
    hopeful = gain.ceiling > 0
    hopeful[0] = False
    when_off = np.where(hopeful, gain.upper, -np.inf).argmax(0)
    when_off = np.where(hopeful.any(0), when_off, -1)
    present = gain.estimate[chosen, batches]
    worth = gain.upper > present
    worth[0] = True
    worth[chosen, batches] = False
    when_on = np.where(worth, last_trial, np.iinfo(np.int64).max).argmin(0)
    return np.where(chosen > 0, when_on, when_off)
