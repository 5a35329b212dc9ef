"""The final answer of a response by the rule of docs/guide/tasks.md, and the value of a number in any of the ways to write it."""

import re
from fractions import Fraction
from typing import Any

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
ANSWER_PHRASE = re.compile(r"\banswer(?:\s+is\b|\**\s*:)", re.IGNORECASE)

NOTATIONS: tuple[tuple[str, Any], ...] = (
    ("\N{MINUS SIGN}", "-"),
    (r"\{,\}|\\[,!](?=\d)", ","),  # LaTeX's thousands separators
    (r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda number: number[0].replace(",", "")),
    (r"\$(?=[\d.])", ""),
    (r"\\[dt]?frac ?(?:\{(\d+)\}|(\d)) ?(?:\{(\d+)\}|(\d))", r"\1\2/\3\4"),
    (r"(?<=\d) ?/ ?(?=\d)", "/"),
    (r" ?(?:\N{MULTIPLICATION SIGN}|\*|\\times|\\cdot) ?10\^\{?([-+]?\d+)\}?", r"e\1"),
)
"""Patterns of other ways to write a part of a number, and the way that NUMBER knows."""

NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:\d+ (?=\d+/\d))?(?:\d+(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?(?:/\d+(?:\.\d+)?)?"
)


def extract_answer(response: str) -> str:
    """Return the final answer of a response by the rule of docs/guide/tasks.md; "" for an empty response."""
    marked = _marked_answer(response)
    return response.strip().rpartition("\n")[2].strip() if marked is None else marked


def extract_number(response: str) -> str:
    """Return the final number of a response by that rule, without thousands separators; "" if there is none."""
    marked = _marked_answer(response)
    numbers = NUMBER.findall(_in_one_notation(response if marked is None else marked)) or [""]
    return str(numbers[-1 if marked is None else 0])


def _marked_answer(response: str) -> str | None:
    for pattern in (TAGGED, BOXED):
        if marked := pattern.findall(response):
            return str(marked[-1]).strip()
    phrases = list(ANSWER_PHRASE.finditer(response))
    if not phrases:
        return None
    rest_of_line, _, below = response[phrases[-1].end() :].partition("\n")
    return rest_of_line.strip(" \t*:") or below.strip()


def number_in(answer: Any) -> Fraction | None:
    """Return the value of an answer that is wholly one number, None for any other and for an exponent of four digits."""
    text = _in_one_notation(str(answer).strip())
    whole, _, part = text.rpartition(" ")  # of a mixed number
    top, _, bottom = part.partition("/")
    if not NUMBER.fullmatch(text) or re.search(r"[eE][-+]?\d{4}", top):
        return None
    try:
        value = Fraction(top) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):  # Python reads no number of more than 4,300 digits
        return None
    return Fraction(whole) + (-value if whole[0] == "-" else value) if whole else value


def _in_one_notation(text: str) -> str:
    for written, as_number in NOTATIONS:
        text = re.sub(written, as_number, text)
    return text
