"""One verdict over many checks, including the comparison of greedy texts.

The chance of any false alarm is bounded, and the tokens needed are known beforehand. `level` is the p-value at which any
check of a family is sure to fail: alpha / number of checks, the first step of Holm's procedure.

Speculation verifies several positions in one forward pass and plain decoding one, so the matrix kernels differ. In bfloat16
two greedy tokens whose logits round to (almost) the same number may swap. Such a tie is distinguished from a real
difference by the engine's own log-probs, and counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from cotrain.records import Rollout

LEAST_SPECULATED = 100
"""Fewest speculated tokens of a check. In the first check of a run, this many find a total variation distance of 0.26 with
probability 0.9 (detectable_distance); with fewer, only the grossest faults could fail."""

POWER = 0.9  # probability of finding a fault of the stated size

TIE_GAP = {"float32": 1e-4, "bfloat16": 0.26}
"""Log-prob gap up to which two tokens count as tied; in bfloat16, two units in the last place of logits of 16 to 32."""


@dataclass(frozen=True)
class CheckResult:
    check: str
    setting: str  # for example "k=3 probabilistic, T=0.7 top_p=0.9: drafted 2"
    num: int  # number of tokens or prompts
    effect: float
    unit: str
    p: float  # probability of an effect at least as extreme on a lossless engine; 0 is proof of a fault
    adjusted_p: float = math.nan  # smallest false-alarm rate of the family at which it fails; known once judged

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p of {self.check} ({self.setting}) is {self.p}; must be 0..1")


@dataclass(frozen=True)
class Verdict:
    """All checks of a family, in the order in which they were made."""

    results: tuple[CheckResult, ...]
    alpha: float

    @property
    def passed(self) -> bool:
        """No check failed. On a lossless engine this is False with probability at most alpha."""
        return not self.failures

    @property
    def failures(self) -> list[CheckResult]:
        """Checks that failed, the most certain first."""
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
    """Holm's procedure (1979): whatever the dependence of the checks, any false alarm has probability at most alpha."""
    p = np.array([result.p for result in results])
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return Verdict(tuple(replace(r, adjusted_p=q) for r, q in zip(results, adjusted.tolist(), strict=True)), alpha)


def tokens_for_distance(distance: float, level: float) -> int:
    """Number of tokens with which `uniformity_check` finds a difference of `distance` at some point of the order.

    This is the total variation distance if the order separates tokens drawn too often from those drawn too rarely.
    At that point the observed share has a standard deviation of at most 1/2 / sqrt(n), and the largest difference is at
    least the one there. So the number is an upper bound.
    """
    return math.ceil((_ks_quantiles(level) / distance) ** 2)


def detectable_distance(num_tokens: int, level: float) -> float:
    """Inverse of `tokens_for_distance`; at most 1."""
    return min(1.0, _ks_quantiles(level) / math.sqrt(num_tokens))


def _ks_quantiles(level: float) -> float:
    return float(stats.kstwobign.isf(level) + 0.5 * stats.norm.ppf(POWER))


@dataclass(frozen=True)
class GreedyCheck:
    """How many prompts have the same greedy text in both arms."""

    num_prompts: int
    num_identical: int
    num_tied: int  # prompts whose texts first differ at two tokens that are tied within the number format

    @property
    def passed(self) -> bool:
        return self.num_identical + self.num_tied == self.num_prompts

    def result(self, setting: str) -> CheckResult:
        """Return this as a check of a family. A difference other than a tie is proof; the effect is the share of such prompts."""
        share = 1 - (self.num_identical + self.num_tied) / self.num_prompts
        return CheckResult("identity", setting, self.num_prompts, share, "share", 1.0 if self.passed else 0.0)

    def __str__(self) -> str:
        text = f"{self.num_identical}/{self.num_prompts} prompts identical"
        return text + (f", {self.num_tied} up to a rounding tie" if self.num_tied else "")


def compare_greedy(plain: Sequence[Rollout], speculated: Sequence[Rollout], dtype: str) -> GreedyCheck:
    """Compare greedy rollouts of the same prompts, one per prompt in each arm; dtype is the engine's."""
    pairs = list(zip(plain, speculated, strict=True))
    identical = sum(a.token_ids == b.token_ids for a, b in pairs)
    return GreedyCheck(len(pairs), identical, sum(_is_tie(a, b, TIE_GAP[dtype]) for a, b in pairs))


def _is_tie(a: Rollout, b: Rollout, gap: float) -> bool:
    """Is the first difference a tie? Each arm emits its argmax there; tied tokens are equally likely, so at most 1/2 each."""
    for x, y, p, q in zip(a.token_ids, b.token_ids, a.log_probs, b.log_probs, strict=False):
        if x != y:
            return abs(p - q) <= gap and max(p, q) <= math.log(0.5) + gap
    return False
