"""Response lengths of a step: log-normal ones, whose samples of a prompt are alike."""

import numpy as np

from cotrain.simulation.rollout import Ints


def lognormal_lengths(
    prompts: int, samples: int, mean: float, sigma: float, group_share: float, limit: int, seed: int
) -> Ints:
    """[prompts, samples] tokens, 1 to limit.

    mean: before the limit cuts. sigma: standard deviation of log length; group_share: part of its square that is the same for
    all samples of a prompt, 0 to 1.
    """
    rng = np.random.default_rng(seed)
    shared, own = rng.standard_normal((prompts, 1)), rng.standard_normal((prompts, samples))
    logs = np.sqrt(group_share) * shared + np.sqrt(1 - group_share) * own
    lengths = mean * np.exp(sigma * logs - sigma**2 / 2)
    return np.clip(np.rint(lengths), 1, limit).astype(np.int64)
