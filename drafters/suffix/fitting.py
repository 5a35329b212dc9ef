"""How well an index would have drafted recorded rollouts, and the half-life of its texts that follows from it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drafters.suffix.index import SuffixIndex, key_of

HALF_LIVES = (None, 16.0, 8.0, 4.0, 2.0, 1.0)
"""Policy versions after which a text counts half, that are tried; None: texts do not age."""

PLACES = 8
"""Tokens of each rollout that half-lives are compared on: 0.5 ms a rollout."""

LEAST_PLACES = 256
"""Tokens that have to have been compared before a half-life is chosen, and after which one counts half."""


class Finished(NamedTuple):
    """A rollout that the index has not seen."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    """Log-probs of the tokens, under the law that they were drawn from."""
    policy_version: int = 0


def expected_acceptances(
    index: SuffixIndex, rollout: Finished, half_life: float | None, most: int | None = None
) -> np.ndarray:
    """By token of a rollout, the chance that a draft drawn in its place is accepted, if texts aged with this half-life.

    A draft from q is accepted with probability sum_x min(p(x), q(x)) under the policy's law p (Leviathan et al. 2023,
    eq. 3), and min(1, q(x) / p(x)) of a token x that was drawn from p has that as its mean. most: tokens to take, evenly
    spread; None takes all but the first, which is never drafted. Shape [tokens taken].
    """
    start, number = len(rollout.prompt_token_ids), len(rollout.token_ids)
    text = np.array([*rollout.prompt_token_ids, *rollout.token_ids], np.int32)
    chosen = np.arange(1, number, 1 if most is None else max(1, -(-number // most)))
    q = index.probabilities_of(key_of(rollout.prompt_token_ids), text, start, start + chosen, half_life)
    return np.minimum(1.0, q / np.exp(np.array(rollout.log_probs)[chosen]))


class HalfLifeFit:
    """Chooses the half-life with which an index expects most of the rollouts that come, each before it learns them."""

    def __init__(self) -> None:
        self._accepted, self._places = np.zeros(len(HALF_LIVES)), 0.0

    def observe(self, index: SuffixIndex, rollout: Finished) -> None:
        """Compare the half-lives on a rollout that the index does not know yet."""
        found = [expected_acceptances(index, rollout, half_life, PLACES) for half_life in HALF_LIVES]
        kept = 0.5 ** (len(found[0]) / LEAST_PLACES)
        self._accepted = kept * self._accepted + np.sum(found, axis=1)
        self._places = kept * self._places + len(found[0])

    def best(self, present: float | None) -> float | None:
        """The longest of those that are equally good to one draft token in a hundred; the present one before LEAST_PLACES."""
        if self._places < LEAST_PLACES:
            return present
        return HALF_LIVES[int(np.round(self._accepted / self._places, 2).argmax())]
