"""Draws of simulated chains: the laws are reduced once for all (context, token) pairs, then looked up."""

from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from cotrain.lossless.checks import support_check, uniformity_check
from cotrain.lossless.emitted import Draws, draws_of, target_log_probs
from cotrain.lossless.family import CheckResult
from tests.cotrain.lossless.simulated_sampler import VOCAB, Emitted, Model, Setting

MODEL = Model()
DRAFTED = torch.isin(torch.arange(VOCAB), torch.from_numpy(MODEL.draft_vocabulary))


@lru_cache
def table(setting: Setting) -> Draws:
    """Draw VOCAB * context + token is that token after that context."""
    log_law = target_log_probs(torch.from_numpy(MODEL.target), setting.sampling)
    return draws_of(log_law.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(VOCAB), DRAFTED)


def draws(emitted: Emitted, setting: Setting) -> Draws:
    """Emitted tokens under the target's own laws."""
    return table(setting).select(VOCAB * emitted.context + emitted.token)


def split(emitted: Emitted, chains_each: int) -> list[Emitted]:
    """Independent runs of that many chains each."""
    ends = np.searchsorted(emitted.chain, np.arange(0, emitted.chain[-1] + 2, chains_each))
    return [emitted.select(np.arange(a, b)) for a, b in pairwise(ends)]


def all_checks(draws: Draws, setting: str, rng: np.random.Generator) -> list[CheckResult]:
    """All checks that need nothing but the draws."""
    return [support_check(draws, setting), *(uniformity_check(draws, setting, rng, order) for order in range(2))]
