"""All checks of some draws that need nothing but the draws."""

import numpy as np

from cotrain.lossless.draws import Draws
from cotrain.lossless.family import CheckResult
from cotrain.lossless.goodness import log_prob_check, support_check, uniformity_check


def all_checks(draws: Draws, setting: str, rng: np.random.Generator) -> list[CheckResult]:
    """Support, log-probs and one uniformity check for each order of the draws."""
    return [
        support_check(draws, setting),
        log_prob_check(draws, setting),
        *(uniformity_check(draws, setting, rng, order) for order in draws.before),
    ]
