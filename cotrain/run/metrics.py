"""Drafting metrics of one step."""

from cotrain.records import SpeculationCounts


def speculation_metrics(counts: SpeculationCounts | None) -> dict[str, float]:
    """Return the drafting metrics of one step; empty when the step did not speculate.

    Names and definitions are vLLM's: the rate of position i is the share of drafts that accepted draft token i.
    Acceptance is left out of a step that drafted nothing, because 1.00 would read as a drafter that fails, and so is that of
    a position that no draft was long enough for.
    """
    if counts is None:
        return {}
    metrics: dict[str, float] = {"rollout/drafted_tokens": counts.num_draft_tokens}
    metrics["rollout/num_drafts"] = counts.num_drafts
    if counts.num_drafts:
        metrics["rollout/acceptance_length"] = counts.acceptance_length
        for position, accepted in enumerate(counts.accepted_per_position, start=1):
            if any(counts.steps[position - 1 :]):
                metrics[f"rollout/acceptance_rate_pos_{position}"] = accepted / counts.num_drafts
    return metrics
