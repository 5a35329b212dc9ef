"""How well an index would have drafted recorded rollouts, and the half-life of its texts that follows from it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drafters.suffix.index import SuffixIndex, key_of

HALF_LIVES = (1.0, 2.0, 4.0, 8.0, 16.0, None)
"""Policy versions after which a text counts half, that are tried; None: texts do not age."""

FITTED_PLACES = 2048
"""Tokens that a half-life is fitted on: 0.5 s for all that are tried."""


class Finished(NamedTuple):
    """A rollout that the index has not seen."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    """Of the tokens, under the law that they were drawn from."""


def expected_acceptance(index: SuffixIndex, rollouts: Sequence[Finished], half_life: float | None) -> float:
    """Share of sampled draft tokens that would have been accepted, if texts aged with this half-life.

    The share is sum_x min(p(x), q(x)) for the policy's law p and the draft's q (Leviathan et al. 2023, eq. 3), and
    min(1, q(x) / p(x)) of a token x that was drawn from p has that as its mean. Takes FITTED_PLACES tokens, evenly spread.
    """
    stride = max(1, sum(len(rollout.token_ids) for rollout in rollouts) // FITTED_PLACES)
    shares = []
    for rollout in rollouts:
        start = len(rollout.prompt_token_ids)
        text = np.array([*rollout.prompt_token_ids, *rollout.token_ids], np.int32)
        chosen = np.arange(1, len(rollout.token_ids), stride)  # the first token of a response is never drafted
        q = index.probabilities_of(key_of(rollout.prompt_token_ids), text, start, start + chosen, half_life)
        shares.append(np.minimum(1.0, q / np.exp(np.array(rollout.log_probs)[chosen])))
    accepted = np.concatenate(shares) if shares else np.zeros(0)
    return float(accepted.mean()) if len(accepted) else 0.0


def fit_half_life(index: SuffixIndex, rollouts: Sequence[Finished]) -> float | None:
    """The half-life of HALF_LIVES with which the index expects most of these rollouts; the longest of equally good ones.

    They have to be newer than what the index knows.
    """
    return max(reversed(HALF_LIVES), key=lambda half_life: round(expected_acceptance(index, rollouts, half_life), 2))
