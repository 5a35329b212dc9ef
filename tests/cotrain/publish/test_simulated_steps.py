"""A short form of `python -m benchmarks.gate_decisions --simulate`: healthy drafters in steps that say little of them."""

import pytest

from benchmarks.gate_simulation import CASES, Case, simulate

SHORT = {"4 x 4": 80, "4 x 4, 1 to 3 tokens": 160, "4 x 4, 60 % of one token": 240, "8 x 4, lag 2, sd 0.8": 100,
         "4 x 4, lag 4, sd 1.2": 160}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SHORT], ids=lambda case: case.name)
def test_a_healthy_drafter_is_never_stopped_and_a_better_one_is_soon_published(case: Case) -> None:
    found = simulate(case, SHORT[case.name])
    assert found.is_good, found
    assert found.judged > 20 and len(found.waited) >= 2
