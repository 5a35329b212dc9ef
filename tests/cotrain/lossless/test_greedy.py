"""Greedy text with and without speculation: a difference fails, a tie within the number format is counted."""

import math

import pytest

from cotrain.lossless.family import GreedyCheck, compare_greedy
from cotrain.records import Rollout, Versions

EQUAL = math.log(0.5)
SURE = ([5, 6, 7], [-0.1, -0.2, -0.3])


def rollout(token_ids: list[int], log_probs: list[float]) -> Rollout:
    return Rollout("p", 0, [1, 2], token_ids, log_probs, "", "length", Versions(0, 0))


def compare(plain: list[tuple], speculated: list[tuple], dtype: str = "float32") -> GreedyCheck:
    return compare_greedy([rollout(*p) for p in plain], [rollout(*s) for s in speculated], dtype)


def test_equal_texts_pass() -> None:
    check = compare([SURE, SURE], [SURE, SURE])
    assert check.passed and str(check) == "2/2 prompts identical"
    assert check.result("greedy, k=3").p == 1.0


def test_another_token_is_proof() -> None:
    check = compare([SURE, SURE], [SURE, ([5, 9, 7], [-0.1, -0.2, -0.3])])
    assert (check.num_identical, check.num_tied) == (1, 0)
    result = check.result("greedy, k=3")
    assert (result.setting, result.num, result.effect, result.p) == ("greedy, k=3", 2, 0.5, 0.0)


@pytest.mark.parametrize(
    ("dtype", "gap", "tied"), [("float32", 1e-5, 1), ("float32", 1e-2, 0), ("bfloat16", 0.25, 1), ("bfloat16", 0.5, 0)]
)
def test_a_tie_is_one_within_the_number_format(dtype: str, gap: float, tied: int) -> None:
    plain, speculated = ([5, 9, 8], [-0.1, EQUAL - gap, -2.0]), ([5, 6, 7], [-0.1, EQUAL, -0.3])
    check = compare([plain, SURE], [speculated, SURE], dtype)
    assert check.num_tied == tied and check.passed == bool(tied)
    if tied:
        assert str(check) == "1/2 prompts identical, 1 up to a rounding tie"


@pytest.mark.parametrize(
    ("plain", "speculated"),
    [
        (([6], [-0.1]), ([5], [-0.1])),  # two tokens above one half cannot be tied
        (([9, 8], [-3.0, EQUAL]), ([5, 6], [-0.01, EQUAL])),  # only the first difference counts
        (([5, 6, 7], [-0.1, -0.1, -0.1]), ([5, 6], [-0.1, -0.1])),  # a text that ends early
    ],
)
def test_what_is_no_tie_fails(plain: tuple, speculated: tuple) -> None:
    assert not compare([plain], [speculated]).passed


def test_after_a_tie_nothing_can_be_compared() -> None:
    assert compare([([9, 8], [EQUAL, -3.0])], [([5, 6], [EQUAL, -0.01])]).num_tied == 1


def test_arms_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([SURE], [])
