"""The final answer of a response, and the value of a number however it is written."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest

from cotrain.tasks.answers import extract_answer, extract_number, number_in


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("I think <answer>12</answer> or rather <answer> 7 </answer>, final answer: 9", "7"),
        (r"So \boxed{3} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("Answer: 5\nNo wait.\nAnswer: 7", "7"),
        ("**Answer:** Paris", "Paris"),
        ("The answer is Paris.\nIt lies on the Seine.", "Paris."),
        ("Answer:\n1 2\n3 4", "1 2\n3 4"),
        ("First line\n  blue whale \n\n", "blue whale"),
        ("Answers vary.\nmaybe", "maybe"),
        ("", ""),
    ],
)
def test_final_answer(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("7 is what 3 + 4 gives, Answer: 7, because 3 + 4", "7"),
        ("10-3", "3"),
        ("1 - 4 = -3", "-3"),
        ("1 - 4 = \N{MINUS SIGN}3", "-3"),
        ("It costs $1,234,567.50.", "1234567.50"),
        ("1,2,3", "3"),
        ("x = -.5", "-.5"),
        ("12345 in total.", "12345"),
        ("no number", ""),
        ("Answer: 1e-05", "1e-05"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{5 \times 10^{3}}", "5e3"),
        ("Answer: -$5 each", "-5"),
        ("Answer: 1 1/2 cups", "1 1/2"),
        ("3/4 = 0.75", "0.75"),
        ("The answer is: none of 3 and 4? <answer>unknown</answer>", ""),
    ],
)
def test_final_number(response, number):
    assert extract_number(response) == number


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (7, 7), (4.0, 4), (1e-5, Fraction(1, 100_000)), (Decimal("1E-5"), Fraction(1, 100_000)), (-0.0, 0),
        ("+7", 7), ("-.5", Fraction(-1, 2)), ("1E5", 100_000), ("$1,000", 1000), ("-1 1/2", Fraction(-3, 2)),
        (r"-\frac12", Fraction(-1, 2)), (r"3 \times 10^{8}", 3 * 10**8), ("1{,}234", 1234), ("6 / 4", Fraction(3, 2)),
        ("1,000/3", Fraction(1000, 3)), ("1e400", 10**400),
    ],
)  # fmt: skip
def test_a_number_has_its_value(answer, value):
    assert number_in(answer) == value


@pytest.mark.parametrize(
    "answer",
    [
        None,
        True,
        [7],
        "",
        "seven",
        "7 apples",
        "7.",
        "12,34",
        "1_000",
        "50%",
        "1/0",
        "2^10",
        "nan",
        "inf",
        float("inf"),
    ],
)
def test_what_is_not_wholly_one_number_has_no_value(answer):
    assert number_in(answer) is None


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "1e999999999", "1e-9999", "9 " * 20_000, " " * 20_000 + "*", "1/" * 9_000]
)
def test_no_text_that_a_policy_may_write_takes_long_or_raises(text):
    began = time.process_time()
    assert number_in(extract_number(f"Answer: {text}")) in (None, 9, 1, Fraction(1))
    assert time.process_time() - began < 1
