"""How many tokens a check needs to find an effect of a stated size, and what a given number would have found.

`level` is what one check of a family gets: alpha / number of checks, Holm's first and strictest step.
"""

import math

from scipy import stats

POWER = 0.9


def level_of_check(alpha: float, num_checks: int) -> float:
    """The p-value at which any check of the family is sure to be rejected."""
    if not 0 < alpha < 1 or num_checks < 1:
        raise ValueError(f"alpha {alpha} and num_checks {num_checks}: need 0 < alpha < 1 and at least one check")
    return alpha / num_checks


def tokens_for_distance(distance: float, level: float, power: float = POWER) -> int:
    """Tokens for `uniformity_check` to find a difference of `distance` at some point of the order.

    That is the total variation distance when the order separates tokens drawn too often from those drawn too rarely.
    At that point the observed share has a standard deviation of at most 1/2 / sqrt(n); the largest difference is at
    least the one there. So n is an upper bound.
    """
    _check(distance, level, power)
    return math.ceil((_ks_quantiles(level, power) / distance) ** 2)


def detectable_distance(num_tokens: int, level: float, power: float = POWER) -> float:
    """Inverse of `tokens_for_distance`; at most 1."""
    _check(num_tokens, level, power)
    return min(1.0, _ks_quantiles(level, power) / math.sqrt(num_tokens))


def tokens_for_log_prob_shift(shift: float, deviation: float, level: float, power: float = POWER) -> int:
    """Tokens for `log_prob_check` to find a mean log-prob that is `shift` nats off.

    deviation: standard deviation of a token's log-prob in nats, sqrt(mean of Draws.variance), 1 to 2 for a language
    model at temperature 1. Normal approximation.
    """
    _check(shift, level, power)
    _check(deviation, level, power)
    quantiles = float(stats.norm.isf(level / 2) + stats.norm.ppf(power))
    return math.ceil((quantiles * deviation / shift) ** 2)


def texts_for_two_sample(distance: float, cells: int, level: float, power: float = POWER) -> int:
    """Texts of each arm for `two_sample_check` to find this total variation distance, spread over so many cells.

    A chi-square distance is at least 4 distance^2 (Cauchy-Schwarz); two samples of n each see half of it n times.
    """
    _check(distance, level, power)
    if cells < 2:
        raise ValueError(f"cells is {cells}; tokens that differ fall into two cells at least")
    critical = stats.chi2.isf(level, cells - 1)

    def found(num: int) -> float:
        return float(stats.ncx2.sf(critical, cells - 1, 2 * num * distance**2))

    high = 1
    while found(high) < power:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) >= power else (middle, high)
    return high


def permutations_for_level(level: float) -> int:
    """Permutations with which `two_sample_check` can reach the level, with one of them to spare."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; need 0 < level < 1")
    return math.ceil(2 / level)


def _ks_quantiles(level: float, power: float) -> float:
    return float(stats.kstwobign.isf(level) + 0.5 * stats.norm.ppf(power))


def _check(effect: float, level: float, power: float) -> None:
    if effect <= 0 or not 0 < level < 1 or not 0.5 <= power < 1:
        raise ValueError(f"effect {effect}, level {level}, power {power}: need effect > 0, 0 < level < 1, power 0.5..1")
