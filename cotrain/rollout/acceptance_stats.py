"""SpeculationCounts of requests and of steps; nothing is cumulative."""

from collections.abc import Iterable

from cotrain.records import SpeculationCounts


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
