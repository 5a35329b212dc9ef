"""Metrics of one step: its rollouts, the policy lag of their tokens, the idle time of each role. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cotrain.acceptance_stats import counts_by_versions, total_counts
from cotrain.records import Rollout, RolloutBatch, ScoredRollout
from cotrain.run.metrics import metrics_of, speculation_metrics


def rollout_metrics(
    rollouts: list[ScoredRollout],
    window: RolloutBatch,
    drafter_version: int,
    recomputes: bool,
    num_engines: int = 1,
) -> dict[str, float]:
    """Reward, length and acceptance come from the rollouts trained on; speed, feature tap and speculation gain from the window.

    drafter_version: the one served. recomputes: see `steps_by_segment`.
    """
    n, num_tokens = len(rollouts), sum(len(r.rollout.token_ids) for r in rollouts)
    metrics: dict[str, Any] = {
        "policy/reward": sum(r.reward for r in rollouts) / n,
        "policy/groups_with_signal": len({r.rollout.prompt_id for r in rollouts if r.advantage}) * 1.0,
        "rollout/response_length": num_tokens / n,
        "rollout/generated_tokens": num_tokens,
        "rollout/truncated": sum(r.rollout.finish_reason == "length" for r in rollouts) / n,
    }
    if recomputes:
        metrics["rollout/recomputed_tokens"] = sum(recomputed_tokens(scored.rollout) for scored in rollouts)
    metrics |= speculation_metrics(total_counts(r.rollout.speculation for r in rollouts))
    by_versions = counts_by_versions((r.rollout for r in rollouts), recomputes)
    for age, name in enumerate(("serving", "previous")):
        counts = total_counts(c for v, c in by_versions.items() if v.drafter == drafter_version - age)
        if counts is not None and counts.num_drafts:
            metrics |= {f"rollout/acceptance_length_{name}": counts.acceptance_length} | metrics_of(counts, age)
    if window.seconds:
        metrics["rollout/tokens_per_s"] = window.num_generated_tokens / window.seconds
    metrics |= {} if window.gain is None else window.gain.metrics()
    if stats := window.feature_stats:
        tapped = stats["num_tokens"] or 1
        metrics |= {
            "rollout/tapped_rollouts": stats["num_rollouts"],
            "rollout/feature_holes": stats["num_holes"] / tapped,
            "rollout/tap_overhead": stats["record_seconds"] / (window.seconds * num_engines),
            "rollout/feature_bytes_per_token": stats["num_bytes"] / tapped,
        }
    return metrics


def recomputed_tokens(rollout: Rollout) -> int:
    """Prompt and response tokens that were computed again because the policy changed during the response."""
    parts = pairwise(rollout.segments)
    starts = [b.start for a, b in parts if a.versions.policy != b.versions.policy]
    return sum(starts) + len(starts) * len(rollout.prompt_token_ids)


def lag_metrics(rollouts: Sequence[Rollout], policy_version: int) -> dict[str, float]:
    """Policy lag per token when a step trains on these rollouts, and how much of it arose during generation and in the queue."""
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    lags = np.array([policy_version - s.versions.policy for s in segments for _ in range(s.start, s.end)])
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    in_queue = np.repeat([policy_version - rollout.versions.policy for rollout in rollouts], lengths)
    metrics = {
        "stream/lag_mean": lags.mean(),
        "stream/lag_max": lags.max(),
        "stream/lag_in_flight": (lags - in_queue).mean(),
        "stream/lag_in_queue": in_queue.mean(),
        "stream/segments_per_rollout": np.mean([len(rollout.segments) for rollout in rollouts]),
        "stream/mixed_rollouts": sum(r.segments[0].versions.policy != r.versions.policy for r in rollouts),
    }
    metrics |= {f"stream/lag_tokens_{lag}": (lags == lag).sum() for lag in range(int(lags.max()) + 1)}
    return {name: float(value) for name, value in metrics.items()}


def idle_metrics(
    row: dict[str, float], engines_busy: Sequence[float], engines_span: float, has_drafter: bool
) -> dict[str, float]:
    """Share of the step in which each role was idle. engines_busy: seconds that each engine computed, of `engines_span`; none
    where that is not known."""
    busy = {f"rollout_{i}": seconds / engines_span for i, seconds in enumerate(engines_busy)}
    busy["policy"] = row.get("time/update_s", 0.0) / row["time/step_s"]
    if has_drafter:
        busy["drafter"] = (row.get("drafter/train_s", 0.0) + row.get("drafter/score_s", 0.0)) / row["time/step_s"]
    return {f"idle/{role}": max(0.0, 1 - share) for role, share in busy.items()}
