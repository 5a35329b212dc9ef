"""Conditional acceptance of each draft position, as the engine serves it.

a_i is the rate at which position i is accepted, given that it was drafted and all positions before it were accepted. So what is
seen at one draft length predicts the others: a step of length k yields L_k = 1 + sum_{i<=k} prod_{j<=i} a_j tokens per request.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cotrain.engine.speculation.step_costs import Array

MEMORIES = np.array([100.0, 16.0])[:, None, None]
"""Drafts after which an observation counts half, in what is believed and in what was seen last. Each position forgets by its own
drafts, so that what is known about lengths that are not drafted at present is kept."""

CONTRADICTION = 4.5
"""Log-likelihood ratio between what was seen last and what is believed, above which only the last counts: a policy or a drafter
has changed. Without a change that happens once in several thousand drafts."""

FIRST_RATE, FIRST_DRAFTS = 0.5, 2.0
"""Acceptance of the first position that is assumed before anything was drafted, and the number of drafts that this counts for.
An unknown drafter is tried wherever an acceptance of one half would pay."""

DEEPER_DRAFTS = 4.0
"""A deeper position is assumed to be like the one before it; this is the number of drafts that the assumption counts for."""

EXPECTED_DRAFTS = 100.0  # number of drafts that the trainer's expectation of a new drafter counts for


class Choice(NamedTuple):
    """A draft length for one request."""

    length: int
    tokens: float  # expected tokens of a step


class ServedAcceptance:
    """Acceptance counts by draft position, with forgetting."""

    def __init__(self, max_speculative_tokens: int, expected_rates: Sequence[float] = (), by_length: bool = False):
        """expected_rates [K or fewer]: for position i, the share of drafts expected to accept it and all before it.

        by_length: each draft length has counts of its own, for a drafter that proposes other tokens for another length, as blocks
        do that are not causal.
        """
        sets = max_speculative_tokens + 1 if by_length else 1
        self._trials, self._accepted = np.zeros((2, 2, sets, max_speculative_tokens))  # [memories, sets, K] each
        known = len(expected_rates)
        self._trials[0, :, :known] = EXPECTED_DRAFTS * np.array([1.0, *expected_rates])[:known]
        self._accepted[0, :, :known] = EXPECTED_DRAFTS * np.array(expected_rates)

    def observe(self, drafts: Sequence[tuple[int, int]]) -> None:
        """Count one engine step: (draft tokens, accepted ones) of each request with drafts."""
        if not drafts:
            return
        drafted, accepted = np.array(drafts).T[:, :, None, None]  # [requests, 1, 1] each
        _, sets, length = self._trials.shape
        counts, positions = (sets == 1) | (drafted == np.arange(sets)[:, None]), np.arange(length)
        trials = (counts & (np.minimum(drafted, accepted + 1) > positions)).sum(0)
        kept = 0.5 ** (trials / MEMORIES)
        self._trials = kept * self._trials + trials
        self._accepted = kept * self._accepted + (counts & (accepted > positions)).sum(0)

    def forget_what_is_contradicted(self) -> None:
        """Let only the last drafts count at positions where they contradict what is believed."""
        believed, seen = (self._accepted + 0.5) / (self._trials + 1)
        surprise = seen * np.log(seen / believed) + (1 - seen) * np.log((1 - seen) / (1 - believed))
        changed = self._trials[1] * surprise > CONTRADICTION
        self._trials[0, changed], self._accepted[0, changed] = self._trials[1, changed], self._accepted[1, changed]

    def tokens_per_step(self) -> Array:
        """Return L_k, the expected tokens of a step, for each draft length k [K+1]."""
        rates, belief, weight = np.empty_like(self._trials[0]), np.array(FIRST_RATE), FIRST_DRAFTS
        for i, (trials, accepted) in enumerate(zip(self._trials[0].T, self._accepted[0].T, strict=True)):
            rates[:, i] = belief = (accepted + weight * belief) / (trials + weight)
            weight = DEEPER_DRAFTS
        tokens = np.insert(1.0 + np.cumsum(np.cumprod(rates, 1), 1), 0, 1.0, 1)
        return tokens[0] if len(tokens) == 1 else tokens.diagonal()

    def best(self, ratios: Sequence[float] | None, longest: int) -> Choice:
        """Return the draft length up to `longest` that yields the most tokens above what its time would yield without speculation.

        ratios [K+1]: t_k / t_0, the cost of a step in tokens without speculation; None returns `longest`. Pricing the time by what
        it yields with speculation is more exact, but gains no more (benchmarks/request_lengths.py).
        """
        tokens = self.tokens_per_step()[: longest + 1]
        best = longest if ratios is None else int((tokens - ratios[: longest + 1]).argmax())
        return Choice(best, float(tokens[best]))
