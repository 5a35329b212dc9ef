"""Tests of drawn outcomes against their own laws.

The laws differ from outcome to outcome and depend on the text so far, so there are no cells to count. The randomised
probability integral transform turns each outcome into a number that is uniform given all before it, whatever the laws:
these numbers are independent and uniform for a fixed number of outcomes (generate with ignore_eos; texts that end at
a stop token add a deviation of the order of the number of texts over the number of tokens).
"""

import numpy as np
from scipy import stats

from cotrain.lossless.draws import BY_PROBABILITY, Draws, Floats
from cotrain.lossless.family import CheckResult

EDGE_SHARE = 0.01
"""Largest chance that truncation cuts elsewhere than the law does at a token: ties up to the error of a logit."""


def support_check(draws: Draws, setting: str) -> CheckResult:
    """Nothing impossible was drawn. One such outcome is proof: p is 0 with any, 1 without. Effect: their share."""
    outside = int(draws.outside.sum())
    return CheckResult(
        "support", setting, _count(draws), outside, outside / len(draws), "share", 0.0 if outside else 1.0
    )


def uniformity_check(draws: Draws, setting: str, rng: np.random.Generator, order: str = BY_PROBABILITY) -> CheckResult:
    """Kolmogorov-Smirnov test of the transformed outcomes, exact in finite samples; rng breaks the discreteness.

    Effect: largest difference between the observed and the predicted share of outcomes up to a point of the order. It
    estimates a lower bound of the mean total variation distance, and that distance itself when the outcomes drawn too
    often all come before those drawn too rarely (sharpening or flattening, with the order by probability).
    """
    num = _count(draws)
    if order not in draws.before:
        raise ValueError(f"order {order!r} is not one of the draws' orders: {', '.join(draws.before)}")
    distance = ks_distance(transformed(draws, rng, order))
    p = float(stats.kstwo.sf(distance, num))
    return CheckResult(f"uniformity by {order}", setting, num, distance * num**0.5, distance, "TV", p)


def log_prob_check(draws: Draws, setting: str) -> CheckResult:
    """Sum of the log-probs of what was drawn, against its expectation: finds sharper or flatter than the law.

    A martingale; z is the sum over the square root of its predictable variance. p is two-sided from Pearson's type III
    distribution with the sum's own skewness: log-probs are skewed, and the normal tail would be too thin.
    Effect: nats per outcome above expectation. Laws without variance (greedy) give z 0 and p 1.
    """
    num = _count(draws)
    excess, variance = float((draws.log_prob - draws.mean).sum()), float(draws.variance.sum())
    if variance <= 1e-12 * num:
        return CheckResult("log-prob", setting, num, 0.0, excess / num, "nats", 1.0)
    z = excess / variance**0.5
    tail = stats.pearson3(float(draws.third_moment.sum()) / variance**1.5)
    p = min(1.0, 2 * float(min(tail.sf(z), tail.cdf(z))))
    return CheckResult("log-prob", setting, num, z, excess / num, "nats", p)


def returned_log_prob_check(
    returned: Floats, draws: Draws, setting: str, tolerance: float | Floats, edge: float | Floats = 0.0
) -> CheckResult:
    """Log-probs the engine returned [N] are those of the law, up to the tolerance in nats.

    edge: how much more a log-prob may differ where truncation cuts at another token than the law. Both are one number,
    or one for each [N]. A difference beyond both together is proof: p is 0. Otherwise p is the probability of at least
    as many tokens beyond the tolerance when each is with probability EDGE_SHARE, whatever the others are. So a false
    alarm needs a logit error beyond the one behind the tolerance, or cuts elsewhere more often than that; p bounds
    neither. Effect: largest difference. Impossible outcomes are left to `support_check`.
    """
    if len(returned) != len(draws):
        raise ValueError(f"{len(returned)} returned log-probs for {len(draws)} tokens: give one for each")
    possible = ~draws.impossible
    gaps = np.abs(returned - draws.log_prob)[possible]
    near, far = (np.broadcast_to(bound, len(draws))[possible] for bound in (tolerance, np.add(tolerance, edge)))
    largest = float(gaps.max(initial=0.0))
    cut_elsewhere = int((gaps > near).sum())
    # Written so that NaN fails.
    p = float(stats.binom.sf(cut_elsewhere - 1, len(gaps), EDGE_SHARE)) if (gaps <= far).all() else 0.0
    return CheckResult("returned log-probs", setting, _count(draws), largest, largest, "nats", p)


def transformed(draws: Draws, rng: np.random.Generator, order: str = BY_PROBABILITY) -> Floats:
    """Numbers [N], independent and uniform on [0, 1] when each outcome has its law (Smith 1985, Czado et al. 2009)."""
    return draws.before[order] + rng.random(len(draws)) * draws.probability


def ks_distance(uniforms: Floats) -> float:
    """Largest difference between the empirical distribution function of [N] numbers and the uniform one."""
    ordered, num = np.sort(uniforms), len(uniforms)
    steps = np.arange(num + 1) / num
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def _count(draws: Draws) -> int:
    if not len(draws):
        raise ValueError("draws: nothing to test; a check needs at least one outcome")
    return len(draws)
