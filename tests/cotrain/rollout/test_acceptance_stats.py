"""Counts from vLLM's own per-request accumulator."""

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from cotrain.records import SpeculationCounts
from cotrain.rollout.acceptance_stats import counts_of_request, total_counts


def metrics_of(steps: list[tuple[int, int]], k: int = 3) -> RequestSpecDecodeMetrics:
    """steps: (draft tokens, accepted draft tokens) of each verification step."""
    metrics = RequestSpecDecodeMetrics.new(k)
    for drafted, accepted in steps:
        metrics.observe(drafted, accepted)
    return metrics


def test_a_position_counts_when_all_before_it_were_accepted():
    counts = counts_of_request(metrics_of([(3, 0), (3, 1), (3, 3), (2, 2)]))
    assert counts == SpeculationCounts(4, 11, (3, 2, 1))
    assert counts.acceptance_length == 1 + 6 / 4


def test_the_acceptance_length_is_vllms():
    metrics = metrics_of([(3, 2), (3, 0), (1, 1)])
    assert counts_of_request(metrics).acceptance_length == pytest.approx(metrics.to_dict()["mean_acceptance_length"])


def test_totals_are_sums_over_requests():
    requests = [metrics_of([(3, 3), (3, 1)]), None, metrics_of([(3, 0)])]
    assert total_counts(counts_of_request(m) for m in requests) == SpeculationCounts(3, 9, (2, 1, 1))


def test_without_speculation_there_are_no_counts():
    assert counts_of_request(None) is None
    assert total_counts([None, None]) is None
    assert total_counts([]) is None


def test_a_request_that_was_never_drafted_for_has_length_one():
    counts = counts_of_request(metrics_of([]))
    assert counts == SpeculationCounts(0, 0, (0, 0, 0))
    assert counts.acceptance_length == 1.0
