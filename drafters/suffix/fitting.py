"""Measures how well an index would have drafted recorded rollouts, and chooses the half-life of its texts from that."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drafters.suffix.index import SuffixIndex, key_of

HALF_LIVES = (None, 16.0, 8.0, 4.0, 2.0, 1.0)
"""Half-lives that are tried: policy versions after which a text has half the weight. None: texts do not age."""

PLACES = 8
"""Most tokens of each rollout on which the half-lives are compared; this takes 0.5 ms per rollout."""

LEAST_PLACES = 256
"""Tokens that must be compared before a half-life is chosen. After as many more tokens, a comparison has half its weight."""


class Finished(NamedTuple):
    """A finished rollout that the index has not seen."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    """Log-probs of the tokens, under the distribution that they were drawn from."""
    policy_version: int = 0


def expected_acceptances(
    index: SuffixIndex, rollout: Finished, half_life: float | None, most: int | None = None
) -> np.ndarray:
    """Return, for tokens of a rollout, unbiased estimates [tokens taken] of the acceptance of a draft token in their place.

    A draft token from q is accepted with probability sum_x min(p(x), q(x)) under the policy's distribution p (Leviathan
    et al. 2023, eq. 3). This is the mean of min(1, q(x) / p(x)) over tokens x drawn from p. half_life: of the index's texts.
    most: tokens to take at most, evenly spread; None takes all. The first token is never drafted and always left out.
    """
    start, number = len(rollout.prompt_token_ids), len(rollout.token_ids)
    text = np.array([*rollout.prompt_token_ids, *rollout.token_ids], np.int32)
    chosen = np.arange(1, number, 1 if most is None else max(1, -(-number // most)))
    q = index.probabilities_of(key_of(rollout.prompt_token_ids), text, start, start + chosen, half_life)
    return np.minimum(1.0, q / np.exp(np.array(rollout.log_probs)[chosen]))


class HalfLifeFit:
    """Chooses the half-life with which the index would draft new rollouts best, each judged before the index learns it."""

    def __init__(self) -> None:
        self._accepted, self._places = np.zeros(len(HALF_LIVES)), 0.0

    def observe(self, index: SuffixIndex, rollout: Finished) -> None:
        """Compare the half-lives on a rollout that the index does not know yet."""
        found = [expected_acceptances(index, rollout, half_life, PLACES) for half_life in HALF_LIVES]
        kept = 0.5 ** (len(found[0]) / LEAST_PLACES)
        self._accepted = kept * self._accepted + np.sum(found, axis=1)
        self._places = kept * self._places + len(found[0])

    def best(self, present: float | None) -> float | None:
        """Return the best half-life, the longest if several agree in acceptance to 0.01; `present` before LEAST_PLACES tokens."""
        if self._places < LEAST_PLACES:
            return present
        return HALF_LIVES[int(np.round(self._accepted / self._places, 2).argmax())]
