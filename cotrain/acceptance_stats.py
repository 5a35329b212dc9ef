"""Counts of the verification steps of rollouts, and the steps of their last segments."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cotrain.records import Rollout, SpeculationCounts

DEPTHS = (0, 32, 128, 512, 2048, 8192, 32768)
"""Response positions at which the parts of a response begin whose acceptance is counted separately."""

CONTEXTS = (0, 512, 2048, 8192, 32768)
"""The same for positions in the whole text, prompt included."""


def counts_of(rollouts: Iterable[Rollout]) -> SpeculationCounts:
    """Count the verification steps of rollouts."""
    counts = SpeculationCounts()
    for rollout in rollouts:
        counts.update(rollout.speculation)
    return counts


def counts_by_depth(rollouts: Iterable[Rollout]) -> list[list[int]]:
    """Count verification steps by depth in the response: [one of DEPTHS, draft tokens, accepted ones, steps] each."""
    counts = {depth: SpeculationCounts() for depth in DEPTHS}
    for whole, _, starts, steps in _turns(rollouts):
        _count(counts, starts - len(whole.prompt_token_ids), steps)
    return [[depth, *kind, n] for depth, kinds in counts.items() for kind, n in sorted(kinds.items())]


def acceptance_by_place(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the acceptance length of each turn, turn_1 to turn_N, and of steps that begin in each part of the context, context_0 to
    context_32768 tokens, prompt included. A part without a step is left out, and what has one part alone."""
    turns, whole = defaultdict[int, SpeculationCounts](SpeculationCounts), list(rollouts)
    for _, number, _, steps in _turns(whole):
        turns[number].update(steps)
    lengths = dict[str, float]()
    for name, places in (("turn", turns), ("context", counts_by_context(whole))):
        found = {f"{name}_{place}": counts.acceptance_length for place, counts in sorted(places.items()) if counts}
        lengths |= found if len(found) > 1 else {}
    return lengths


def counts_by_context(rollouts: Iterable[Rollout]) -> dict[int, SpeculationCounts]:
    """Count verification steps by the part of the context, prompt included, in which they begin: one of CONTEXTS each."""
    counts = {context: SpeculationCounts() for context in CONTEXTS}
    for _, _, starts, steps in _turns(rollouts):
        _count(counts, starts, steps)
    return counts


def _turns(rollouts: Iterable[Rollout]) -> Iterator[tuple[Rollout, int, NDArray[np.int64], Sequence[tuple[int, int]]]]:
    """Yield each turn: its rollout, its number from 1, and where in the context each of its verification steps begins.

    That is found by counting back from the end of the turn, because drafting pauses, if ever, while the batch is large.
    """
    for whole in rollouts:
        for number, turn in enumerate(whole.turns(), start=1):
            steps = turn.verification_steps
            emitted = np.fromiter((1 + accepted for _, accepted in reversed(steps)), np.int64)
            # The first may be too low, if the last went on after the end.
            yield whole, number, len(turn.prompt_token_ids) + len(turn.token_ids) - emitted.cumsum()[::-1], steps


def _count(counts: dict[int, SpeculationCounts], starts: NDArray[np.int64], steps: Sequence[tuple[int, int]]) -> None:
    """Add verification steps to the counts of the part of the text in which they begin. counts: by where their parts begin."""
    bounds = 0, *np.searchsorted(starts, [*counts][1:]).tolist(), len(steps)
    for part, (begin, end) in zip(counts, pairwise(bounds), strict=True):
        counts[part].update(steps[begin:end])


def last_segments(rollouts: Iterable[Rollout], recomputes: bool = True) -> list[Rollout]:
    """Return the last segment of each rollout, see `last_segment`; of a trajectory, one for each turn that ends in it."""
    turns = [(rollout, turn) for rollout in rollouts for turn in rollout.turns()]
    return [last_segment(turn, recomputes) for rollout, turn in turns if turn.versions == rollout.versions]


def last_segment(rollout: Rollout, recomputes: bool = True) -> Rollout:
    """Return the last segment of a rollout as a rollout of its own, whose prompt is all that came before it.

    Its verification steps are found by counting tokens. The first token of a response has none, and neither has the first one after
    a policy update that computes the text again (recomputes). It has none if the count ends too early, because drafting paused or
    a request was preempted.
    """
    segments = rollout.segments
    start = segments[-1].start
    if not start:
        return rollout
    updates = [b.start for a, b in pairwise(segments) if recomputes and a.versions.policy != b.versions.policy]
    position, steps = 1, list[tuple[int, int]]()
    for drafted, accepted in rollout.verification_steps:
        position += position in updates
        if position >= start:
            steps.append((drafted, accepted))
        position += 1 + accepted
    is_whole = position + (position in updates) >= len(rollout.token_ids)
    return replace(
        rollout,
        prompt_token_ids=rollout.prompt_token_ids + rollout.token_ids[:start],
        token_ids=rollout.token_ids[start:],
        log_probs=rollout.log_probs[start:],
        verification_steps=tuple(steps) if is_whole else (),
        earlier=(),
    )
