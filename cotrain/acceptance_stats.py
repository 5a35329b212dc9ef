"""Counts of the verification steps of rollouts, and the steps of their last segments."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from cotrain.records import Rollout, SpeculationCounts

DEPTHS = (0, 32, 128, 512, 2048, 8192, 32768)
"""Response positions at which the parts of a response begin whose acceptance is counted separately."""


def counts_of(rollouts: Iterable[Rollout]) -> SpeculationCounts:
    """Count the verification steps of rollouts."""
    counts = SpeculationCounts()
    for rollout in rollouts:
        counts.update(rollout.speculation)
    return counts


def counts_by_depth(rollouts: Iterable[Rollout]) -> list[list[int]]:
    """Count verification steps by depth in the response: [one of DEPTHS, draft tokens, accepted ones, steps] each. Depth is
    found by counting back from the end of each turn, because drafting pauses, if ever, while the batch is large."""
    counts = {depth: SpeculationCounts() for depth in DEPTHS}
    for whole, turn in ((rollout, turn) for rollout in rollouts for turn in rollout.turns()):
        steps, before = turn.verification_steps, len(turn.prompt_token_ids) - len(whole.prompt_token_ids)
        emitted = np.fromiter((1 + accepted for _, accepted in reversed(steps)), np.int64)
        # The first is below `before` if the last went on after the end.
        starts = before + len(turn.token_ids) - emitted.cumsum()[::-1]
        bounds = 0, *np.searchsorted(starts, DEPTHS[1:]).tolist(), len(steps)
        for depth, (begin, end) in zip(DEPTHS, pairwise(bounds), strict=True):
            counts[depth].update(steps[begin:end])
    return [[depth, *kind, n] for depth, kinds in counts.items() for kind, n in sorted(kinds.items())]


def last_segments(rollouts: Iterable[Rollout], recomputes: bool = True) -> list[Rollout]:
    """Return the last segment of each rollout, see `last_segment`; of a trajectory, one for each turn that ends in it."""
    turns = [(rollout, turn) for rollout in rollouts for turn in rollout.turns()]
    return [last_segment(turn, recomputes) for rollout, turn in turns if turn.versions == rollout.versions]


def last_segment(rollout: Rollout, recomputes: bool = True) -> Rollout:
    """Return the last segment of a rollout as a rollout of its own, whose prompt is all that came before it.

    Its verification steps are found by counting tokens. The first token of a response has none, and neither has the first one after
    a policy update that computes the text again (recomputes). It has none if the count ends too early, because drafting paused or
    a request was preempted.
    """
    segments = rollout.segments
    start = segments[-1].start
    if not start:
        return rollout
    updates = [b.start for a, b in pairwise(segments) if recomputes and a.versions.policy != b.versions.policy]
    position, steps = 1, list[tuple[int, int]]()
    for drafted, accepted in rollout.verification_steps:
        position += position in updates
        if position >= start:
            steps.append((drafted, accepted))
        position += 1 + accepted
    is_whole = position + (position in updates) >= len(rollout.token_ids)
    return replace(
        rollout,
        prompt_token_ids=rollout.prompt_token_ids + rollout.token_ids[:start],
        token_ids=rollout.token_ids[start:],
        log_probs=rollout.log_probs[start:],
        verification_steps=tuple(steps) if is_whole else (),
        earlier=(),
    )
