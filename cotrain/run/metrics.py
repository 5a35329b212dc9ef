"""What the drafter versions of one run reached while they were served, pooled over steps by draft length.

Acceptance lengths of different draft lengths are not compared, because more draft tokens accept more. Runs are not
compared either, since their policies, prompts and sampling differ.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from cotrain.records import SpeculationCounts

LEAST_DRAFTS = 30
"""A version is ranked from so many verification steps on; the acceptance length of fewer is mostly noise."""

DRAFTS, ACCEPTED = "rollout/drafts_k", "rollout/accepted_k"
"""Metrics of a step; the draft length follows the name."""


class Served(NamedTuple):
    """Acceptance of a version at the draft length at which it was served most."""

    acceptance_length: float
    num_speculative_tokens: int
    num_drafts: int


class ServedDrafts:
    """Verification steps and accepted draft tokens of each drafter version, by draft length."""

    def __init__(self) -> None:
        self._drafts: dict[int, Counter[int]] = defaultdict(Counter)
        self._accepted: dict[int, Counter[int]] = defaultdict(Counter)

    def add(self, drafter_version: int, metrics: Mapping[str, Any]) -> None:
        """Count one step that this version served, from the metrics that `metrics_of` made."""
        for name, drafts in metrics.items():
            if name.startswith(DRAFTS) and drafts:
                k = int(name.removeprefix(DRAFTS))
                self._drafts[drafter_version][k] += int(drafts)
                self._accepted[drafter_version][k] += int(metrics[f"{ACCEPTED}{k}"])

    def of(self, drafter_version: int) -> Served | None:
        """None for a version whose drafts were never verified."""
        if drafter_version not in self._drafts:
            return None
        ((k, drafts),) = self._drafts[drafter_version].most_common(1)
        return Served(1 + self._accepted[drafter_version][k] / drafts, k, drafts)

    def best(self) -> int | None:
        """The version with the longest acceptance length at the draft length that the run served most.

        None while no version has LEAST_DRAFTS verification steps of it.
        """
        by_length = sum(self._drafts.values(), Counter[int]())
        if not by_length:
            return None
        ((k, _),) = by_length.most_common(1)
        ranked = [version for version, drafts in self._drafts.items() if drafts[k] >= LEAST_DRAFTS]
        return max(ranked, key=lambda version: self._accepted[version][k] / self._drafts[version][k], default=None)


def metrics_of(counts: SpeculationCounts) -> dict[str, float]:
    """Verification steps and accepted draft tokens of one step, for each draft length that it served."""
    metrics: dict[str, float] = {}
    for k, (drafts, accepted) in enumerate(zip(counts.steps, counts.accepted, strict=True), start=1):
        if drafts:
            metrics |= {f"{DRAFTS}{k}": drafts, f"{ACCEPTED}{k}": sum(accepted)}
    return metrics


def speculation_metrics(counts: SpeculationCounts | None, k: int) -> dict[str, float]:
    """Drafting of one step, from counter deltas; empty when the step did not speculate.

    Names and definitions are vLLM's: the rate of position i is the share of drafts that accepted draft token i.
    Acceptance is left out of a step that drafted nothing, because 1.00 would read as a drafter that fails.
    """
    if counts is None:
        return {}
    metrics: dict[str, float] = {
        "rollout/drafted_tokens": counts.num_draft_tokens,
        "rollout/num_drafts": counts.num_drafts,
    }
    if counts.num_drafts:
        metrics |= {"rollout/acceptance_length": counts.acceptance_length} | metrics_of(counts)
        accepted = counts.accepted_per_position + (0,) * (k - len(counts.accepted_per_position))
        for position, steps_accepted in enumerate(accepted, start=1):
            metrics[f"rollout/acceptance_rate_pos_{position}"] = steps_accepted / counts.num_drafts
    return metrics
