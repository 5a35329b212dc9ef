"""The order in which recorded rollouts are trained on: a pure function of their lengths, the bounds and the seed.

segments   rollouts whose features are computed together, in the order recorded
mixes      segments in random order, as many as fit into memory together
batches    the rollouts of a mix in random order, cut into batches of even size

So an interrupted run goes on with the very batch that would have come next, and the number of updates is known before
the first one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Mix:
    """What is in memory together: numbers of segments, and batches of numbers of rollouts."""

    segments: list[int]
    batches: list[list[int]]


def cut_segments(lengths: Sequence[int], max_rollouts: int, max_tokens: int) -> list[range]:
    """Consecutive rollouts of `lengths` tokens; a rollout above max_tokens is a segment of its own."""
    segments: list[range] = []
    begin = tokens = 0
    for number, length in enumerate(lengths):
        if number > begin and (number - begin == max_rollouts or tokens + length > max_tokens):
            segments.append(range(begin, number))
            begin, tokens = number, 0
        tokens += length
    return [*segments, range(begin, len(lengths))] if lengths else []


def plan_epoch(
    lengths: Sequence[int], segments: Sequence[range], max_tokens: int, batch_tokens: int, seed: int, epoch: int
) -> list[Mix]:
    """Every rollout once, in mixes of at most max_tokens and batches of at most batch_tokens.

    A longer segment or rollout comes alone.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = rng.sample(range(len(segments)), len(segments))
    groups: list[list[int]] = []
    tokens = 0
    for number in order:
        size = sum(lengths[i] for i in segments[number])
        if not groups or tokens + size > max_tokens:
            groups.append([])
            tokens = 0
        groups[-1].append(number)
        tokens += size
    mixes = []
    for group in groups:
        rollouts = [i for number in sorted(group) for i in segments[number]]
        rng.shuffle(rollouts)
        mixes.append(Mix(group, _batches(rollouts, lengths, batch_tokens)))
    return mixes


def _batches(rollouts: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut evenly, so that no batch is a small remainder."""
    left = sum(lengths[i] for i in rollouts)
    batches: list[list[int]] = []
    begin = 0
    while begin < len(rollouts):
        share = left / ceil(left / batch_tokens)
        end, tokens = begin, 0
        while (
            end < len(rollouts) and tokens < share and (end == begin or tokens + lengths[rollouts[end]] <= batch_tokens)
        ):
            tokens += lengths[rollouts[end]]
            end += 1
        batches.append(rollouts[begin:end])
        begin, left = end, left - tokens
    return batches
