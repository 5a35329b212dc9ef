"""One verdict over many checks: the chance of any false alarm is bounded, and the tokens needed are known beforehand.

`level` is the p-value at which any check of a family is sure to fail: alpha / number of checks, Holm's first step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

POWER = 0.9
"""Probability to find a fault of the stated size."""


@dataclass(frozen=True)
class CheckResult:
    check: str
    setting: str
    """For example "k=3 probabilistic, T=0.7 top_p=0.9: drafted 2"."""
    num: int
    """Tokens or prompts."""
    effect: float
    unit: str
    p: float
    """Probability of an effect at least as extreme on a lossless engine; 0 is proof of a fault."""
    adjusted_p: float = math.nan
    """Smallest false-alarm rate of its whole family at which the check fails; known once the family is judged."""

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p of {self.check} ({self.setting}) is {self.p}; must be 0..1")


@dataclass(frozen=True)
class Verdict:
    """All checks of a family, in the order they were given."""

    results: tuple[CheckResult, ...]
    alpha: float

    @property
    def passed(self) -> bool:
        """No check failed. On a lossless engine this is False with probability at most alpha."""
        return not self.failures

    @property
    def failures(self) -> list[CheckResult]:
        """Checks that failed, the surest first."""
        return sorted((r for r in self.results if r.adjusted_p <= self.alpha), key=lambda result: result.p)

    def __str__(self) -> str:
        count, failures = len(self.results), self.failures
        if not failures:
            return f"lossless: {count} checks passed, false-alarm rate of all together at most {self.alpha:g}"
        worst = failures[0]
        return (
            f"NOT lossless: {len(failures)} of {count} checks failed, first {worst.check} ({worst.setting}): "
            f"effect {worst.effect:.3g} {worst.unit}, adjusted p {worst.adjusted_p:.2g}"
        )


def judge(results: Sequence[CheckResult], alpha: float) -> Verdict:
    """Holm's procedure (1979): whatever the dependence of the checks, any false alarm has probability alpha at most."""
    p = np.array([result.p for result in results])
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return Verdict(tuple(replace(r, adjusted_p=q) for r, q in zip(results, adjusted.tolist(), strict=True)), alpha)


def tokens_for_distance(distance: float, level: float) -> int:
    """Tokens for `uniformity_check` to find a difference of `distance` at some point of the order.

    That is the total variation distance when the order separates tokens drawn too often from those drawn too rarely.
    At that point the observed share has a standard deviation of at most 1/2 / sqrt(n); the largest difference is at
    least the one there. So n is an upper bound.
    """
    return math.ceil((_ks_quantiles(level) / distance) ** 2)


def detectable_distance(num_tokens: int, level: float) -> float:
    """Inverse of `tokens_for_distance`; at most 1."""
    return min(1.0, _ks_quantiles(level) / math.sqrt(num_tokens))


def _ks_quantiles(level: float) -> float:
    return float(stats.kstwobign.isf(level) + 0.5 * stats.norm.ppf(POWER))
