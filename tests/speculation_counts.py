"""Drafting counts and expectations of one draft length, for tests that need no more."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cotrain.publish.acceptance import ExpectedAcceptance
from cotrain.records import SpeculationCounts


def steps_of(num_drafts: int, num_speculative_tokens: int, accepted: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Verification steps that all had `num_speculative_tokens` draft tokens; accepted: how many of them got to each position."""
    ended = [here - beyond for here, beyond in pairwise([num_drafts, *accepted, 0])]
    return tuple((num_speculative_tokens, taken) for taken, number in enumerate(ended) for _ in range(number))


def counts(num_drafts: int, num_speculative_tokens: int, accepted: Sequence[int]) -> SpeculationCounts:
    """Count the steps that `steps_of` returns."""
    return SpeculationCounts(steps_of(num_drafts, num_speculative_tokens, accepted))


def expected(rates: Sequence[float], standard_error: float = 0.05, num_groups: int = 10) -> ExpectedAcceptance:
    """A drafter whose positions do not depend on the draft length, known with one standard error at each of them."""
    most = len(rates)
    # Of G values without one prompt each, two lie apart and give the jackknife this standard error.
    apart = standard_error * (num_groups / (num_groups - 1) / 2) ** 0.5
    by_length, without = [], []
    for k in range(1, most + 1):
        by_length.append((*rates[:k], *(0.0,) * (most - k)))
        length = sum(rates[:k])
        without.append((length - apart, length + apart, *(length,) * (num_groups - 2)))
    return ExpectedAcceptance(np.array(by_length), np.array(without))
