"""What the drafter versions of one run reached in serving: verification steps, pooled by draft length over all steps.

Lengths of different k are not compared: more draft tokens accept more, and verification steps begin elsewhere. Runs are
not compared either, since their policies, prompts and sampling differ.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from cotrain.records import SpeculationCounts

LEAST_DRAFTS = 30
"""Verification steps at one draft length from which a version is ranked: the acceptance length of fewer is mostly
noise."""

DRAFTS, ACCEPTED = "rollout/drafts_k", "rollout/accepted_k"
"""Metrics of a step, with the draft length behind them."""


class Served(NamedTuple):
    """Acceptance of a version at the draft length at which it was served most."""

    acceptance_length: float
    draft_tokens: int
    num_drafts: int


class ServedDrafts:
    """Counts of each drafter version by draft length."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    def add(self, drafter_version: int, metrics: Mapping[str, Any]) -> None:
        """Count one step that this version served; `metrics` are those of `metrics_of`, others are passed over."""
        for name, drafts in metrics.items():
            if name.startswith(DRAFTS) and drafts:
                draft_tokens = int(name.removeprefix(DRAFTS))
                counted = self._counts[drafter_version][draft_tokens]
                counted[0] += int(drafts)
                counted[1] += int(metrics[f"{ACCEPTED}{draft_tokens}"])

    def of(self, drafter_version: int) -> Served | None:
        """None for a version that no draft token of was verified."""
        counts = self._counts.get(drafter_version)
        if not counts:
            return None
        draft_tokens = max(counts, key=lambda k: counts[k][0])
        drafts, accepted = counts[draft_tokens]
        return Served(1 + accepted / drafts, draft_tokens, drafts)

    def best(self) -> int | None:
        """The version with the longest acceptance length at the draft length that the run served most.

        None while no version has LEAST_DRAFTS verification steps of it.
        """
        drafts_of: dict[int, int] = defaultdict(int)
        for counts in self._counts.values():
            for draft_tokens, (drafts, _) in counts.items():
                drafts_of[draft_tokens] += drafts
        if not drafts_of:
            return None
        common = max(drafts_of, key=lambda k: drafts_of[k])
        ranked = {
            version: counts[common][1] / counts[common][0]
            for version, counts in self._counts.items()
            if common in counts and counts[common][0] >= LEAST_DRAFTS
        }
        return max(ranked, key=lambda version: ranked[version], default=None)


def metrics_of(counts: SpeculationCounts) -> dict[str, float]:
    """Verification steps and accepted draft tokens of one step, for each draft length that it served."""
    metrics: dict[str, float] = {}
    for draft_tokens, (drafts, accepted) in enumerate(zip(counts.steps, counts.accepted, strict=True), start=1):
        if drafts:
            metrics[f"{DRAFTS}{draft_tokens}"] = drafts
            metrics[f"{ACCEPTED}{draft_tokens}"] = sum(accepted)
    return metrics
