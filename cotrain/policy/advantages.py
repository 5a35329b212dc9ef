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
    """Advantage of each rollout, in the order given.

    group_mean:      A_i = r_i - mean(r)                            (Dr. GRPO, arXiv:2503.20783)
    group_mean_std:  A_i = (r_i - mean(r)) / (std(r) + 1e-6)        (GRPO, arXiv:2402.03300)

    The group is every rollout with the same prompt id; std is the sample standard deviation (n - 1). A group whose
    rewards are all equal teaches nothing and gets exactly 0. Raises ValueError for a group of one, which has no
    baseline, and for a reward that is not finite.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, prompt_id in enumerate(prompt_ids):
        groups[prompt_id].append(index)

    advantages = [0.0] * len(rewards)
    for prompt_id, members in groups.items():
        group = [rewards[index] for index in members]
        if not all(map(math.isfinite, group)):
            raise ValueError(
                f"prompt {prompt_id}: rewards {group} are not all finite; check the task's reward function"
            )
        if len(group) == 1:
            raise ValueError(
                f"prompt {prompt_id} has one sample, so no group baseline; set rollout.samples_per_prompt to 2 or more"
            )
        if max(group) - min(group) <= STD_EPSILON:
            continue
        mean = fmean(group)
        scale = stdev(group) + STD_EPSILON if kind == "group_mean_std" else 1.0
        for index, reward in zip(members, group, strict=True):
            advantages[index] = (reward - mean) / scale
    return advantages
