"""Metrics of the rollouts of one step, and of the policy lag of their tokens. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cotrain.acceptance_stats import acceptance_by_place, counts_of
from cotrain.records import Rollout, RolloutBatch, SpeculationCounts


def rollout_metrics(rollouts: list[Rollout], window: RolloutBatch, num_engines: int = 1) -> dict[str, float]:
    """Length comes from the rollouts trained on; speed, feature tap and speculation gain from the window."""
    n, num_tokens = len(rollouts), sum(rollout.num_generated for rollout in rollouts)
    metrics: dict[str, Any] = {
        "rollout/response_length": num_tokens / n,
        "rollout/generated_tokens": num_tokens,
        "rollout/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / n,
    }
    if window.seconds:
        metrics["rollout/tokens_per_s"] = window.num_generated_tokens / window.seconds
    if window.tool_share:
        metrics["rollout/tool_share"] = window.tool_share
    if window.gain is not None:
        metrics["rollout/speedup_vs_no_speculation"] = window.gain.speedup_vs_no_speculation
    if stats := window.feature_stats:
        tapped = stats["num_tokens"] or 1
        metrics |= {
            "rollout/tapped_rollouts": stats["num_rollouts"],
            "rollout/feature_holes": stats["num_holes"] / tapped,
            "rollout/tap_overhead": stats["record_seconds"] / (window.seconds * num_engines),
            "rollout/feature_bytes_per_token": stats["num_bytes"] / tapped,
            "rollout/dropped_features": stats.get("num_dropped", 0.0),
        }
    return metrics


def speculation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the drafting metrics of one step: of all rollouts, and the acceptance of each turn and part of the context."""
    places = acceptance_by_place(rollouts)
    return drafting_metrics(counts_of(rollouts)) | {f"rollout/acceptance_{place}": n for place, n in places.items()}


def drafting_metrics(counts: SpeculationCounts) -> dict[str, float]:
    """Return the drafting metrics of some verification steps.

    Names and definitions are vLLM's: the rate of position i is the share of drafts that accepted draft token i.
    Acceptance is left out of a step that drafted nothing, because 1.00 would read as a drafter that fails, and so is that of
    a position that no draft was long enough for.
    """
    num_drafts, drafted_tokens = counts.total(), sum(drafted * n for (drafted, _), n in counts.items())
    metrics: dict[str, float] = {"rollout/drafted_tokens": drafted_tokens, "rollout/num_drafts": num_drafts}
    if counts:
        metrics["rollout/acceptance_length"] = counts.acceptance_length
        for position, accepted in enumerate(counts.accepted_per_position, start=1):
            metrics[f"rollout/acceptance_rate_pos_{position}"] = accepted / num_drafts
    return metrics


def lag_metrics(rollouts: Sequence[Rollout], policy_version: int) -> dict[str, float]:
    """Policy lag per token when a step trains on these rollouts."""
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    sizes = np.array([s.end - s.start for s in segments])
    lags, sizes = np.array([policy_version - s.versions.policy for s in segments])[sizes > 0], sizes[sizes > 0]
    metrics = {
        "lag_mean": np.average(lags, weights=sizes),
        "lag_max": lags.max(),
        "segments_per_rollout": len(segments) / len(rollouts),
    } | {f"lag_tokens_{lag}": number for lag, number in enumerate(np.bincount(lags, sizes))}
    return {f"stream/{name}": float(value) for name, value in metrics.items()}
