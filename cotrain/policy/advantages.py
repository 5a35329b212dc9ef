"""Group-relative advantages: how much better a rollout did than the other samples of its prompt."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

STD_EPSILON = 1e-6
"""Added to the standard deviation; rewards that differ by no more than this count as equal."""


def group_advantages(
    prompt_ids: Sequence[str], rewards: Sequence[float], kind: Literal["group_mean", "group_mean_std"]
) -> list[float]:
    """Return the advantage of each rollout, in the order given.

    group_mean:      A_i = r_i - mean(r)                            (Dr. GRPO, arXiv:2503.20783)
    group_mean_std:  A_i = (r_i - mean(r)) / (std(r) + 1e-6)        (GRPO, arXiv:2402.03300)

    The group is every rollout with the same prompt id; std is the sample standard deviation (n - 1). A group whose
    rewards are all equal teaches nothing and gets exactly 0.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for prompt_id, reward in zip(prompt_ids, rewards, strict=True):
        groups[prompt_id].append(reward)
    baselines = {prompt_id: _mean_and_scale(group, kind) for prompt_id, group in groups.items()}
    return [(r - baselines[p][0]) / baselines[p][1] for p, r in zip(prompt_ids, rewards, strict=True)]


def _mean_and_scale(group: list[float], kind: str) -> tuple[float, float]:
    if max(group) - min(group) <= STD_EPSILON:
        return 0.0, math.inf
    return fmean(group), stdev(group) + STD_EPSILON if kind == "group_mean_std" else 1.0
