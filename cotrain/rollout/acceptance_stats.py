"""Turns verification steps into SpeculationCounts, of requests and of segments. No counts are cumulative."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

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
    counts: Counter[tuple[int, int, int]] = Counter()
    for rollout in rollouts:
        start = len(rollout.token_ids) - sum(1 + accepted for _, accepted in rollout.verification_steps)
        for drafted, accepted in rollout.verification_steps:
            depth = DEPTHS[bisect_right(DEPTHS, max(start, 0)) - 1]  # below 0: the last step went on after the end
            counts[depth, drafted, accepted] += 1
            start += 1 + accepted
    return [[*kind, number] for kind, number in sorted(counts.items())]


def last_segment(rollout: Rollout, recomputes: bool = True) -> Rollout:
    """Return the last segment of a rollout as a rollout of its own, whose prompt is all that came before it.

    It has no counts when `steps_by_segment` returns None.
    """
    start = rollout.segments[-1].start
    if not start:
        return rollout
    by_segment, counts = steps_by_segment(rollout, recomputes), None
    if rollout.speculation is not None and by_segment is not None:
        counts = counts_of_steps(by_segment[-1], len(rollout.speculation.steps))
    return replace(
        rollout,
        prompt_token_ids=rollout.prompt_token_ids + rollout.token_ids[:start],
        token_ids=rollout.token_ids[start:],
        log_probs=rollout.log_probs[start:],
        speculation=counts,
        verification_steps=() if by_segment is None else tuple(by_segment[-1]),
        earlier=(),
    )


def counts_by_versions(rollouts: Iterable[Rollout], recomputes: bool = True) -> dict[Versions, SpeculationCounts]:
    """Return counts by policy and drafter, over rollouts whose verification steps can be assigned to their segments."""
    found: dict[Versions, list[SpeculationCounts]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.speculation is not None and not rollout.earlier:
            found[rollout.versions].append(rollout.speculation)
        elif rollout.speculation is not None:
            for segment, steps in zip(rollout.segments, steps_by_segment(rollout, recomputes) or (), strict=False):
                found[segment.versions].append(counts_of_steps(steps, len(rollout.speculation.steps)))
    return {versions: total for versions, counts in found.items() if (total := total_counts(counts)) is not None}


def steps_by_segment(rollout: Rollout, recomputes: bool = True) -> list[list[tuple[int, int]]] | None:
    """Return the verification steps of each segment, which are found by counting tokens.

    The first token of a response has no verification step, and neither has the first one after a policy update that computes the
    text again (recomputes). Returns None if the count ends too early, because drafting paused or a request was preempted.
    """
    starts = [segment.start for segment in rollout.segments]
    parts = pairwise(rollout.segments)
    updates = {b.start for a, b in parts if recomputes and a.versions.policy != b.versions.policy}
    position, found = 1, [list[tuple[int, int]]() for _ in starts]
    for drafted, accepted in rollout.verification_steps:
        position += position in updates
        found[bisect_right(starts, position) - 1].append((drafted, accepted))
        position += 1 + accepted
    position += position in updates
    return found if position >= len(rollout.token_ids) else None
