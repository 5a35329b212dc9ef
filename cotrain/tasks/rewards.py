"""Rewards of dataset tasks, and the rule of docs/tasks.md that finds the final answer in a response."""

import inspect
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from cotrain.tasks.prompts import Messages

Reward = Callable[[Messages, str, Any], float]
"""(prompt messages, response, answer) -> finite float."""

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
ANSWER_PHRASE = re.compile(r"\banswer(?:\s+is\b|\**\s*:)", re.IGNORECASE)
NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)")


def extract_answer(response: str) -> str:
    """Return the final answer of a response by the rule of docs/tasks.md; "" for an empty response."""
    marked = _marked_answer(response)
    return response.strip().rpartition("\n")[2].strip() if marked is None else marked


def extract_number(response: str) -> str:
    """Return the final number of a response by that rule, without thousands separators; "" if there is none."""
    marked = _marked_answer(response)
    numbers = NUMBER.findall((response if marked is None else marked).replace("\N{MINUS SIGN}", "-")) or [""]
    return str(numbers[-1 if marked is None else 0]).replace(",", "")


def _marked_answer(response: str) -> str | None:
    for pattern in (TAGGED, BOXED):
        if found := pattern.findall(response):
            return found[-1].strip()
    phrases = list(ANSWER_PHRASE.finditer(response))
    if not phrases:
        return None
    rest_of_line, _, below = response[phrases[-1].end() :].partition("\n")
    return rest_of_line.strip(" \t*:") or below.strip()


def exact(prompt: Messages, response: str, answer: Any) -> float:
    """Return 1 if the final answer equals the answer, apart from white space and a final full stop."""
    found, expected = (" ".join(text.split()).removesuffix(".") for text in (extract_answer(response), str(answer)))
    return float(found == expected)


def numeric(prompt: Messages, response: str, answer: Any) -> float:
    """Return 1 when the final number equals the answer as a decimal number."""
    expected = extract_number(str(answer))
    if not expected:
        raise ValueError(f"task.reward: numeric needs answers with a number, got {answer!r}")
    found = extract_number(response)
    return float(bool(found) and Decimal(found) == Decimal(expected))


def math_verify(prompt: Messages, response: str, answer: Any) -> float:
    """Return 1 when math-verify finds the response's expression equal to the answer.

    Its time limit of five seconds uses a signal, which Python delivers to the main thread only; in other threads it raises.
    """
    from math_verify import parse, verify

    return float(verify(parse(str(answer)), parse(response)))


REWARDS: dict[str, Reward] = {"exact": exact, "numeric": numeric, "math_verify": math_verify}


def load_reward(name: str) -> Reward:
    """Return the reward called name in task.reward: a key of REWARDS, or the dotted path of a user's function.

    The function may be written package.module:function or package.module.function, and its module may lie in the
    working folder. Raises ValueError naming task.reward when it cannot be imported or called with (prompt, response,
    answer). What it returns is checked at every call to be a finite number.
    """
    if name in REWARDS:
        return REWARDS[name]
    # For a console script, sys.path starts with the script's own folder, not with the working folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
        inspect.signature(function).bind([], "", "")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"task.reward: {name} is neither {', '.join(REWARDS)} nor a function (prompt, response, answer) that can "
            f"be imported as package.module:function ({error})"
        ) from error
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"task.reward: {name} is async; it must return the number itself")

    def reward(prompt: Messages, response: str, answer: Any) -> float:
        value = function(prompt, response, answer)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"task.reward: {name} must return a finite number, got {value!r} for {response[:80]!r}")
        return number

    return reward
