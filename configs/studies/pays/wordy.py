"""A reward for many words, which moves a policy with a high learning rate far within a few steps."""

from typing import Any

ENOUGH = 96


def distinct_words(prompt: Any, response: str, answer: Any) -> float:
    """Number of different words in the response, as a share of ENOUGH; 1 from there on."""
    return min(len(set(response.lower().split())) / ENOUGH, 1.0)
