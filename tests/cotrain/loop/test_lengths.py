"""Expected lengths of responses."""

import json

import numpy as np
import pytest

from cotrain.loop.ledger import LengthHistory


def observe(lengths: LengthHistory, prompt_id: str, found: list[int], cap: int = 10**9) -> None:
    lengths.observe(prompt_id, found, [length >= cap for length in found])


def drawn_history(cap: int = 10**9, spread: float = 0.5, groups: int = 400) -> LengthHistory:
    """Log-normal lengths around 400 tokens for one prompt; those that reach the cap are truncated."""
    generator, lengths = np.random.default_rng(0), LengthHistory()
    for group in np.minimum(400 * np.exp(generator.normal(0, spread, (groups, 8))), cap).astype(int).tolist():
        observe(lengths, "a", group, cap)
    return lengths


def test_a_prompt_is_expected_to_go_on_as_it_was_and_an_unseen_one_as_all_others() -> None:
    lengths = LengthHistory()
    assert lengths.expected("a") == lengths.expected("b") == pytest.approx(1.0)
    observe(lengths, "a", [100, 100])
    observe(lengths, "b", [25])
    assert lengths.expected("a") == pytest.approx(100) and lengths.expected("b") == pytest.approx(25)
    assert lengths.expected("c") == pytest.approx(50)
    observe(lengths, "a", [50, 50])
    assert lengths.expected("a") == pytest.approx(100 * 0.5**0.5)


def test_a_prompt_whose_samples_were_truncated_is_expected_to_reach_the_cap() -> None:
    lengths = LengthHistory()
    for found, expected in (([20, 20], 20), ([128, 128], 128), ([30, 128], 128), ([20, 20], (128 * 20) ** 0.5)):
        observe(lengths, "a", found, cap=128)
        assert lengths.expected("a") == pytest.approx(expected)
    observe(lengths, "b", [20, 20, 128], cap=128)
    assert lengths.expected("b") < 60, "most of its samples ended by themselves"


def test_a_saved_history_goes_on_as_it_was() -> None:
    lengths = drawn_history(cap=600, groups=20)
    observe(lengths, "b", [5])
    again = LengthHistory(json.loads(json.dumps(lengths.logs)))
    for history in (lengths, again):
        observe(history, "a", [7, 9])
        observe(history, "c", [900], cap=900)
    for prompt in "abcd":
        assert again.expected(prompt) == lengths.expected(prompt)
    assert again.logs == lengths.logs
