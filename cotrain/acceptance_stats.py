"""Turns verification steps into SpeculationCounts, of requests and of segments. No counts are cumulative."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np

from cotrain.records import Rollout, SpeculationCounts, Versions

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
    by_length = zip(*(c.accepted for c in present), strict=True)
    return SpeculationCounts(
        tuple(map(sum, zip(*(c.steps for c in present), strict=True))),
        tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in by_length),
    )


def counts_by_depth(rollouts: Iterable[Rollout]) -> list[list[int]]:
    """Count verification steps by depth in the response: [one of DEPTHS, draft tokens, accepted ones, steps] each.

    Depth is found by counting back from the end of the response, because drafting pauses, if ever, while the batch is large.
    """
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

    It has no counts when `steps_by_segment` returns None.
    """
    start = rollout.segments[-1].start
    if not start:
        return rollout
    by_segment, counts = steps_by_segment(rollout, recomputes), rollout.speculation
    steps = by_segment[-1] if by_segment else []
    return replace(
        rollout,
        prompt_token_ids=rollout.prompt_token_ids + rollout.token_ids[:start],
        token_ids=rollout.token_ids[start:],
        log_probs=rollout.log_probs[start:],
        speculation=counts_of_steps(steps, len(counts.steps)) if counts and by_segment else None,
        verification_steps=tuple(steps),
        earlier=(),
    )


def counts_by_versions(rollouts: Iterable[Rollout], recomputes: bool = True) -> dict[Versions, SpeculationCounts]:
    """Return the counts by policy and drafter, over rollouts whose verification steps can be assigned to segments."""
    by_versions: dict[Versions, list[SpeculationCounts]] = defaultdict(list)
    for rollout in rollouts:
        if (counts := rollout.speculation) is not None and not rollout.earlier:
            by_versions[rollout.versions].append(counts)
        elif counts is not None:
            for segment, steps in zip(rollout.segments, steps_by_segment(rollout, recomputes) or (), strict=False):
                by_versions[segment.versions].append(counts_of_steps(steps, len(counts.steps)))
    return {versions: total for versions, parts in by_versions.items() if (total := total_counts(parts)) is not None}


def policy_updates(rollout: Rollout) -> list[int]:
    """Return the response positions at which the policy was replaced."""
    return [b.start for a, b in pairwise(rollout.segments) if a.versions.policy != b.versions.policy]


def steps_by_segment(rollout: Rollout, recomputes: bool = True) -> list[list[tuple[int, int]]] | None:
    """Return the verification steps of each segment, by counting tokens: (draft tokens, accepted ones) each.

    The first token of a response has no verification step, and neither has the first one after a policy update that computes the
    text again (recomputes). Returns None if the count ends too early, because drafting paused or a request was preempted.
    """
    starts, updates = [segment.start for segment in rollout.segments], policy_updates(rollout) if recomputes else []
    position, by_segment = 1, [list[tuple[int, int]]() for _ in starts]
    for drafted, accepted in rollout.verification_steps:
        position += position in updates
        by_segment[bisect_right(starts, position) - 1].append((drafted, accepted))
        position += 1 + accepted
    position += position in updates
    return by_segment if position >= len(rollout.token_ids) else None
