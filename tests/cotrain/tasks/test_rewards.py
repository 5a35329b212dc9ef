"""The final-answer rule, the built-in rewards, and loading a user's reward by dotted path."""

import sys

import pytest

from cotrain.tasks.rewards import (
    exact,
    extract_answer,
    extract_number,
    load_reward,
    math_verify,
    numeric,
)

PROMPT = [{"role": "user", "content": "What is 3 + 4?"}]


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
        ("The answer is: none of 3 and 4? <answer>unknown</answer>", ""),
    ],
)
def test_final_number(response, number):
    assert extract_number(response) == number


def test_exact_compares_the_final_answer_only():
    assert exact(PROMPT, "Paris is large.\nThe answer is  Paris.", "Paris") == 1.0
    assert exact(PROMPT, "Paris is large.\nThe answer is Lyon.", "Paris") == 0.0


def test_numeric_compares_values_and_counts_one_number_only():
    assert numeric(PROMPT, "3 + 4 = 7.0", "7") == 1.0
    assert numeric(PROMPT, "1,000", "1000") == 1.0
    assert numeric(PROMPT, "5 6 7 8 9", "7") == 0.0
    assert numeric(PROMPT, "seven", "7") == 0.0


def test_numeric_refuses_an_answer_without_a_number():
    with pytest.raises(ValueError, match=r"task\.reward: numeric needs answers with a number, got 'seven'"):
        numeric(PROMPT, "7", "seven")


def test_math_verify_knows_equal_expressions():
    assert math_verify(PROMPT, r"So the answer is $\frac{2}{4}$.", "0.5") == 1.0
    assert math_verify(PROMPT, r"\boxed{13}", "12") == 0.0


@pytest.fixture
def rewards_module(tmp_path, monkeypatch, request):
    """A module in the working folder, which a console script would not have on its path; returns its name."""
    name = f"rewards_of_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(
        "answer_length = 3\n"
        "def length(prompt, response, answer): return len(response) + len(prompt[0]['content']) + int(answer)\n"
        "def two(prompt, response): return 1.0\n"
        "def text(prompt, response, answer): return 'good'\n"
        "def infinite(prompt, response, answer): return float('inf')\n"
        "async def later(prompt, response, answer): return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [folder for folder in sys.path if folder])
    return name


@pytest.mark.parametrize("separator", [":", "."])
def test_users_function_gets_prompt_response_and_answer(rewards_module, separator):
    reward = load_reward(f"{rewards_module}{separator}length")
    value = reward(PROMPT, "four", "2")
    assert isinstance(value, float)
    assert value == 4 + len(PROMPT[0]["content"]) + 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exakt",
            r"task\.reward: exakt is neither exact, numeric, math_verify nor a function .* package\.module:function",
        ),
        ("no_such_package.module:f", r"task\.reward: no_such_package\.module:f is neither .*No module named"),
        ("{module}:nothing", r"task\.reward: .*:nothing is neither .* has no attribute 'nothing'"),
        ("{module}:answer_length", r"task\.reward: .*:answer_length is neither .*not a callable"),
        ("{module}.two", r"task\.reward: .*\.two is neither .*too many positional arguments"),
        ("{module}:later", r"task\.reward: .*:later is async"),
    ],
)
def test_unusable_function_is_refused_at_load(rewards_module, name, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name.format(module=rewards_module))


@pytest.mark.parametrize(
    ("function", "message"),
    [("text", "text must return a finite number, got 'good' for 'hi'"), ("infinite", "infinite must .*, got inf")],
)
def test_result_must_be_a_finite_number(rewards_module, function, message):
    reward = load_reward(f"{rewards_module}:{function}")
    with pytest.raises(ValueError, match=rf"task\.reward: .*:{message}"):
        reward(PROMPT, "hi", "7")
