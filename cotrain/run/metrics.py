"""Acceptance of the drafter versions of one run while they were served, pooled over steps by draft length.

Acceptance lengths of different draft lengths are not compared, because more draft tokens accept more. Runs are not
compared either, since their policies, prompts and sampling differ.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cotrain.records import SpeculationCounts

LEAST_DRAFTS = 30
"""Verification steps that a version needs to be ranked; with fewer, its acceptance length is mostly noise."""

PREFIXES = ["rollout/", "rollout/previous_"]
"""Of the metrics drafts_k{1..K} and accepted_k{1..K}, for the drafter version that serves and the one before it."""


class ServedDrafts:
    """Verification steps and accepted draft tokens, by draft length and drafter version."""

    def __init__(self) -> None:
        self._drafts, self._accepted = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def add(self, version: int, metrics: Mapping[str, Any]) -> set[int]:
        """Add one step that this version served; metrics hold those of `metrics_of`. Returns the versions that drafted."""
        drafted = set()
        for age, prefix in enumerate(PREFIXES):
            for name in (name for name in metrics if name.startswith(f"{prefix}drafts_k") and metrics[name]):
                k = name.removeprefix(f"{prefix}drafts_k")
                self._drafts[int(k), version - age] += int(metrics[name])
                self._accepted[int(k), version - age] += int(metrics[f"{prefix}accepted_k{k}"])
                drafted.add(version - age)
        return drafted

    def of(self, version: int) -> dict[str, float]:
        """Return a version's acceptance at the draft length at which it served most; empty if it never drafted."""
        drafts, k = max(((drafts, k) for (k, v), drafts in self._drafts.items() if v == version), default=(0, 0))
        if not drafts:
            return {}
        length = round(1 + self._accepted[k, version] / drafts, 4)
        return {"acceptance_length": length, "num_speculative_tokens": k, "num_drafts": drafts}

    def best(self) -> int | None:
        """Return the version with the longest acceptance length at the draft length that the run served most.

        None while no version has LEAST_DRAFTS verification steps at that length.
        """
        by_length = Counter[int]()
        for (k, _), drafts in self._drafts.items():
            by_length[k] += drafts
        most = max(by_length, key=by_length.__getitem__, default=0)
        ranked = [v for (k, v), drafts in self._drafts.items() if k == most and drafts >= LEAST_DRAFTS]
        return max(ranked, key=lambda v: self._accepted[most, v] / self._drafts[most, v], default=None)


def metrics_of(counts: SpeculationCounts, age: int = 0) -> dict[str, float]:
    """Return the verification steps and accepted draft tokens of one step, for each draft length that it served.

    age: 0 for the drafter version that serves, 1 for the one before it.
    """
    metrics: dict[str, float] = {}
    for k, (drafts, accepted) in enumerate(zip(counts.steps, counts.accepted, strict=True), start=1):
        if drafts:
            metrics |= {f"{PREFIXES[age]}drafts_k{k}": drafts, f"{PREFIXES[age]}accepted_k{k}": sum(accepted)}
    return metrics


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
