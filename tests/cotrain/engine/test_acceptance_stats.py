"""Counts from vLLM's own per-request accumulator."""

import pickle
from dataclasses import asdict, replace

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from cotrain.acceptance_stats import counts_by_depth, counts_of, last_segment
from cotrain.records import Rollout, Segment, SpeculationCounts, Versions
from tests.speculation_counts import steps_of


def metrics_of(steps: list[tuple[int, int]], k: int = 3) -> RequestSpecDecodeMetrics:
    """steps: (draft tokens, accepted draft tokens) of each verification step."""
    metrics = RequestSpecDecodeMetrics.new(k)
    for drafted, accepted in steps:
        metrics.observe(drafted, accepted, detailed=True)
    return metrics


def counts_of_request(metrics: RequestSpecDecodeMetrics) -> SpeculationCounts:
    return SpeculationCounts(zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True))


def test_a_position_counts_when_all_before_it_were_accepted():
    counts = counts_of_request(metrics_of([(3, 0), (3, 1), (3, 3), (2, 2)]))
    assert (counts.total(), counts.steps, counts.accepted_per_position) == (4, [0, 1, 3], [3, 2, 1])
    assert counts.acceptance_length == 1 + 6 / 4


def test_the_acceptance_length_is_vllms():
    metrics = metrics_of([(3, 2), (3, 0), (1, 1)])
    assert counts_of_request(metrics).acceptance_length == pytest.approx(metrics.to_dict()["mean_acceptance_length"])


def test_counts_travel_with_a_rollout_and_are_no_field_of_it():
    """The controller adds up what engines have counted, whatever the length of the responses."""
    rollout = rollout_of(9, [(3, 3), (3, 1)])
    assert counts_of([rollout]).total() == 2
    there = pickle.loads(pickle.dumps(rollout))
    assert vars(there)["speculation"] == rollout.speculation and there == rollout
    assert "speculation" not in asdict(rollout)


def test_totals_are_sums_over_rollouts():
    counts = counts_of([rollout_of(7, [(3, 3), (3, 1)]), rollout_of(9, []), rollout_of(2, [(3, 0)])])
    assert counts == SpeculationCounts(steps_of(3, 3, (2, 1, 1)))
    assert (counts.total(), counts.steps, counts.accepted_per_position) == (3, [0, 0, 3], [2, 1, 1])


def test_a_request_that_was_never_drafted_for_has_length_one():
    counts = counts_of_request(metrics_of([]))
    assert not counts and counts == counts_of([]) == counts_of([rollout_of(9, [])])
    assert (counts.acceptance_length, counts.steps, counts.accepted_per_position) == (1.0, [], [])


@pytest.mark.parametrize(
    ("steps", "num_tokens", "throughout"),
    [
        ([(3, 0), (3, 2)], 5, True),
        ([(3, 0), (3, 3)], 4, True),  # the last step reached past the end of the response
        ([(3, 0), (1, 1), (2, 2)], 7, True),
        ([(3, 0), (3, 2)], 6, False),
        ([(3, 3)] * 24 + [(3, 0)], 101, True),  # four tokens of a hundred came without drafts
        ([(3, 3)] * 23 + [(3, 0)], 101, False),
        ([], 1, True),
        ([], 2, False),
    ],
)
def test_a_rollout_in_which_drafting_paused_is_told_apart(steps, num_tokens, throughout):
    assert rollout_of(num_tokens, steps).drafted_throughout == throughout


def rollout_of(num_tokens: int, steps: list[tuple[int, int]]) -> Rollout:
    tokens, log_probs = [5] * num_tokens, [0.0] * num_tokens
    return Rollout("p", 0, [1], tokens, log_probs, "", "stop", Versions(0, 0), tuple(steps))


def test_steps_are_counted_at_the_depth_at_which_they_were_made():
    """Of a response that was drafted throughout, and of one that was drafted for at its end alone."""
    throughout = rollout_of(40, [(3, 3)] * 9 + [(3, 2)])
    assert counts_by_depth([throughout]) == [[0, 3, 3, 8], [32, 3, 2, 1], [32, 3, 3, 1]]
    overshoots = rollout_of(39, [(3, 3)] * 9 + [(3, 2)])
    assert counts_by_depth([overshoots]) == counts_by_depth([throughout]), "its end cuts a token off"
    at_its_end = rollout_of(129, [(1, 0), (2, 1), (2, 0)])
    assert counts_by_depth([rollout_of(3, []), throughout, at_its_end]) == [
        [0, 3, 3, 8], [32, 1, 0, 1], [32, 2, 1, 1], [32, 3, 2, 1], [32, 3, 3, 1], [128, 2, 0, 1],
    ]  # fmt: skip
    assert counts_by_depth([rollout_of(3, [])]) == []


@pytest.mark.parametrize(("policy", "emitted"), [(1, 4), (0, 3)])
def test_the_last_segment_has_the_steps_of_its_own(policy, emitted):
    """After a new policy, the first token has no verification step; after a new drafter alone, it has one."""
    steps = [(3, 1), (3, 0), (3, 1), (2, 0)]
    length = 1 + sum(1 + accepted for _, accepted in steps) + (policy == 1)
    earlier = (Segment(Versions(0, 0), 0, 4),)
    rollout = replace(rollout_of(length, steps), versions=Versions(policy, 1), earlier=earlier)
    last = last_segment(rollout)
    assert last.verification_steps == ((3, 1), (2, 0)) and len(last.token_ids) == emitted
    paused = replace(rollout, token_ids=[5] * 30)
    assert not last_segment(paused).verification_steps, "drafting paused somewhere"
