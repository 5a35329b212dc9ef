"""SpeculationCounts of requests and of steps; nothing is cumulative."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from cotrain.records import Rollout, SpeculationCounts


def counts_of_steps(steps: Iterable[tuple[int, int]], most: int) -> SpeculationCounts:
    """Counts of verification steps, (draft tokens, accepted ones) each, of at most `most` draft tokens."""
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


def last_segment(rollout: Rollout, recomputes: bool = True) -> Rollout:
    """The last segment of a rollout as a rollout of its own, whose prompt is all that came before it.

    Verification steps are given to segments by counting tokens: the first token of a response has no verification step,
    nor has the first one after a policy update that computes the text anew (recomputes). Where that does not add up, because
    drafting paused or a request was preempted, the segment has no counts.
    """
    start = rollout.segments[-1].start
    if not start:
        return rollout
    steps, counts = _steps_from(start, rollout, recomputes), None
    if rollout.speculation is not None and steps is not None:
        counts = counts_of_steps(steps, len(rollout.speculation.steps))
    return replace(
        rollout,
        prompt_token_ids=rollout.prompt_token_ids + rollout.token_ids[:start],
        token_ids=rollout.token_ids[start:],
        log_probs=rollout.log_probs[start:],
        speculation=counts,
        verification_steps=steps or (),
        earlier=(),
    )


def _steps_from(start: int, rollout: Rollout, recomputes: bool) -> tuple[tuple[int, int], ...] | None:
    """The verification steps that emitted tokens `start` and later ones; None where that cannot be said."""
    parts = pairwise(rollout.segments)
    updates = {b.start for a, b in parts if recomputes and a.versions.policy != b.versions.policy}
    position, kept = 1, []
    for drafted, accepted in rollout.verification_steps:
        position += position in updates
        if position >= start:
            kept.append((drafted, accepted))
        position += 1 + accepted
    position += position in updates
    return tuple(kept) if position >= len(rollout.token_ids) else None
