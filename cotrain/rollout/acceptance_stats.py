"""From vLLM's per-request drafting statistics to SpeculationCounts. All counts are of one step: nothing cumulative."""

from collections.abc import Iterable
from typing import Any

from cotrain.records import SpeculationCounts


def counts_of_request(metrics: Any) -> SpeculationCounts | None:
    """metrics: vLLM's RequestSpecDecodeMetrics of one finished request, or None.

    Its histogram counts verification steps by number of accepted draft tokens; position i was accepted in every step
    that accepted more than i.
    """
    if metrics is None:
        return None
    histogram = list(metrics.histogram)
    accepted = tuple(sum(histogram[i + 1 :]) for i in range(len(histogram) - 1))
    return SpeculationCounts(sum(histogram), metrics.num_draft_tokens, accepted)


def verification_steps(metrics: Any) -> tuple[tuple[int, int], ...]:
    """(draft tokens, accepted ones) of each step that verified any; empty where vLLM keeps the summary alone."""
    if metrics is None:
        return ()
    return tuple(zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True))


def total_counts(counts: Iterable[SpeculationCounts | None]) -> SpeculationCounts | None:
    """Sum over requests; None when no request was drafted for."""
    present = [c for c in counts if c is not None]
    if not present:
        return None
    per_position = zip(*(c.accepted_per_position for c in present), strict=True)
    return SpeculationCounts(
        sum(c.num_drafts for c in present),
        sum(c.num_draft_tokens for c in present),
        tuple(sum(position) for position in per_position),
    )
