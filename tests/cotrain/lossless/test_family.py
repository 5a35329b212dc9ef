"""One verdict over many checks."""

import numpy as np
import pytest
from scipy import stats

from cotrain.lossless.family import CheckResult, judge


def result(p: float, check: str = "uniformity") -> CheckResult:
    return CheckResult(check, "T=1 k=3", 1000, 0.05, "TV", p)


def holm(p_values: list[float]) -> list[float]:
    return [judged.adjusted_p for judged in judge([result(p) for p in p_values], alpha=0.01).results]


def test_holm_steps_down() -> None:
    """0.012 * 4, then 0.015 * 3 = 0.045 raised to the one before, 0.03 * 2, and 0.5."""
    assert holm([0.5, 0.015, 0.03, 0.012]) == pytest.approx([0.5, 0.048, 0.06, 0.048])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_verdict_names_the_surest_failure() -> None:
    verdict = judge([result(0.2), result(1e-6, "support"), result(0.004)], alpha=0.01)
    assert not verdict.passed
    assert [failure.check for failure in verdict.failures] == ["support", "uniformity"]
    assert str(verdict) == (
        "NOT lossless: 2 of 3 checks failed, first support (T=1 k=3): effect 0.05 TV, adjusted p 3e-06"
    )
    assert verdict.results[2].adjusted_p == pytest.approx(0.008)


def test_a_pass_states_its_rate() -> None:
    assert str(judge([result(0.2), result(0.3)], 0.01)) == (
        "lossless: 2 checks passed, false-alarm rate of all together at most 0.01"
    )


def test_false_alarms_of_a_family_stay_below_alpha() -> None:
    p_values = np.random.default_rng(0).random((2000, 12))
    alarms = sum(min(holm(list(row))) <= 0.05 for row in p_values)
    assert stats.binom.ppf(0.001, 2000, 0.04) <= alarms <= stats.binom.ppf(0.999, 2000, 0.05)


def test_a_check_without_a_p_value_is_refused() -> None:
    with pytest.raises(ValueError, match="p of uniformity"):
        result(float("nan"))
