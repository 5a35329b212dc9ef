"""One verdict over many checks, with the probability of any false alarm bounded over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CheckResult:
    """One check of one setting."""

    check: str
    setting: str  # "T=0.7 top_p=0.9 k=3 probabilistic, drafted 2"
    num: int  # tokens, or texts
    statistic: float
    effect: float
    effect_unit: str
    p: float
    """Probability of a statistic at least as extreme on a lossless engine; 0 and 1 for checks that prove or pass."""

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p of {self.check} ({self.setting}) is {self.p}; must be 0..1")


@dataclass(frozen=True)
class Row:
    """A check within its family."""

    result: CheckResult
    adjusted_p: float
    failed: bool


@dataclass(frozen=True)
class Verdict:
    """All checks of a family, in the order they were given."""

    rows: tuple[Row, ...]
    alpha: float

    @property
    def passed(self) -> bool:
        """No check failed. On a lossless engine False with probability at most alpha."""
        return not any(row.failed for row in self.rows)

    @property
    def failures(self) -> list[Row]:
        """Checks that failed, the surest first."""
        return sorted((row for row in self.rows if row.failed), key=lambda row: row.result.p)

    def table(self) -> list[dict[str, str | int | float]]:
        """One dictionary a check, in plain values."""
        return [
            {
                "check": row.result.check,
                "setting": row.result.setting,
                "n": row.result.num,
                "statistic": row.result.statistic,
                "effect": row.result.effect,
                "unit": row.result.effect_unit,
                "p": row.result.p,
                "adjusted p": row.adjusted_p,
                "verdict": "FAIL" if row.failed else "ok",
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        count = len(self.rows)
        if self.passed:
            return f"lossless: {count} checks passed, false-alarm rate of all together at most {self.alpha:g}"
        worst = self.failures[0]
        return (
            f"NOT lossless: {len(self.failures)} of {count} checks failed, first {worst.result.check} "
            f"({worst.result.setting}): effect {worst.result.effect:.3g} {worst.result.effect_unit}, "
            f"adjusted p {worst.adjusted_p:.2g}"
        )


def judge(results: Sequence[CheckResult], alpha: float) -> Verdict:
    """Holm's procedure: whatever the dependence of the checks, any false alarm has probability alpha at most."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; use a false-alarm rate between 0 and 1, such as 0.01")
    if not results:
        raise ValueError("results: no check was made, so there is nothing to judge")
    adjusted = holm([result.p for result in results])
    rows = (Row(result, p, p <= alpha) for result, p in zip(results, adjusted, strict=True))
    return Verdict(tuple(rows), alpha)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in the same order: the smallest family-wise rate at which each is rejected (Holm 1979)."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted.tolist()


def alpha_of_look(alpha: float, look: int) -> float:
    """Share of alpha for the look-th (1, 2, ...) look that a monitor considers; those of an endless run add up to alpha."""
    if look < 1:
        raise ValueError(f"look is {look}; the first one is 1")
    return alpha / (look * (look + 1))
