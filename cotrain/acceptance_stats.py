"""Turns verification steps into SpeculationCounts, of requests and of last segments. No counts are cumulative."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np

from cotrain.records import Rollout, SpeculationCounts

DEPTHS = (0, 32, 128, 512, 2048, 8192, 32768)
"""Response positions at which the parts of a response begin whose acceptance is counted separately."""


def counts_of_steps(steps: Iterable[tuple[int, int]], most: int) -> SpeculationCounts:
    """Return the counts of verification steps, (draft tokens, accepted ones) each, of at most `most` draft tokens."""
    num_steps, accepted = [0] * most, [[0] * most for _ in range(most)]
    for drafted, taken in steps:
        if drafted:
            num_steps[drafted - 1] += 1
            for position in range(taken):
                accepted[drafted - 1][position] += 1
    return SpeculationCounts(tuple(num_steps), tuple(map(tuple, accepted)))


def total_counts(counts: Iterable[SpeculationCounts | None]) -> SpeculationCounts | None:
    """Sum over requests; None when no request was drafted for."""
    present = [c for c in counts if c is not None]
    if not present:
        return None
    steps = np.sum([c.steps for c in present], axis=0).tolist()
    accepted = np.sum([c.accepted for c in present], axis=0).tolist()
    return SpeculationCounts(tuple(steps), tuple(map(tuple, accepted)))


def counts_by_depth(rollouts: Iterable[Rollout]) -> list[list[int]]:
    """Count verification steps by depth in the response: [one of DEPTHS, draft tokens, accepted ones, steps] each. Depth is
    found by counting back from the end of the response, because drafting pauses, if ever, while the batch is large."""
    parts = [np.empty((0, 3), np.int64)]
    for rollout in rollouts:
        steps = np.fromiter(chain.from_iterable(rollout.verification_steps), np.int64).reshape(-1, 2)
        starts = len(rollout.token_ids) - (1 + steps[::-1, 1]).cumsum()[::-1]
        # Below 0: the last step went on after the end.
        depths = np.searchsorted(DEPTHS, np.maximum(starts, 0), side="right") - 1
        parts.append(np.column_stack([depths, steps]))
    rows = np.concatenate(parts)
    shape = len(DEPTHS), *(rows.max(axis=0, initial=0)[1:] + 1)
    counts = np.bincount(np.ravel_multi_index(tuple(rows.T), shape), minlength=1)
    kinds = np.nonzero(counts)[0]
    depths, drafted, accepted = np.unravel_index(kinds, shape)
    return np.column_stack([np.take(DEPTHS, depths), drafted, accepted, counts[kinds]]).tolist()


def last_segment(rollout: Rollout, recomputes: bool = True) -> Rollout:
    """Return the last segment of a rollout as a rollout of its own, whose prompt is all that came before it.

    Its verification steps are found by counting tokens. The first token of a response has none, and neither has the first one after
    a policy update that computes the text again (recomputes). It has no counts if the count ends too early, because drafting paused or
    a request was preempted.
    """
    segments, counts = rollout.segments, rollout.speculation
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
        speculation=counts_of_steps(steps, len(counts.steps)) if counts and is_whole else None,
        verification_steps=tuple(steps) if is_whole else (),
        earlier=(),
    )
