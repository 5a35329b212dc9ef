"""Greedy texts, compared token by token."""

import pytest

from cotrain.lossless.identity import Difference, compare_texts


def test_equal_texts_pass():
    identity = compare_texts([[1, 2], [3]], [[1, 2], [3]])
    assert identity.passed
    assert identity.first is None
    assert str(identity) == "2/2 prompts identical"
    assert identity.result("greedy").p == 1.0


def test_the_first_difference_is_named():
    identity = compare_texts([[1, 2, 3, 4], [5, 6, 7], [8]], [[1, 2, 9, 9], [5, 0, 7], [8]])
    assert not identity.passed
    assert identity.num_identical == 1
    assert identity.first == Difference(1, 1, 6, 0, False)
    assert str(identity) == "1/3 prompts identical; prompt 1 differs first at token 1"
    result = identity.result("greedy")
    assert (result.p, result.statistic, result.effect, result.num) == (0.0, 2, pytest.approx(2 / 3), 3)


@pytest.mark.parametrize(("plain", "speculated"), [([1, 2], [1]), ([1], [1, 2])])
def test_a_text_that_ends_early_differs_there_and_is_no_tie(plain, speculated):
    identity = compare_texts([plain], [speculated], is_tie=lambda prompt, position: True)
    assert not identity.passed
    assert identity.first is not None
    assert identity.first.position == 1
    assert {identity.first.plain, identity.first.speculated} == {2, None}


def test_ties_are_counted_and_pass():
    asked = []

    def is_tie(prompt, position):
        asked.append((prompt, position))
        return prompt == 0

    identity = compare_texts([[1, 2, 3], [4, 5]], [[1, 9, 9], [4, 6]], is_tie)
    assert asked == [(0, 1), (1, 1)]
    assert [difference.tied for difference in identity.differences] == [True, False]
    assert "1 up to a rounding tie" in str(identity)
    assert compare_texts([[1, 2]], [[1, 9]], lambda *_: True).passed


def test_arms_of_different_size_are_refused():
    with pytest.raises(ValueError, match="1 texts without and 2 with"):
        compare_texts([[1]], [[1], [2]])
    with pytest.raises(ValueError, match="0 texts"):
        compare_texts([], [])
