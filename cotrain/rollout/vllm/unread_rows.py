"""What the drafter has not read yet: rows of engine steps that drafted nothing.

A drafter attends to every position before the one it drafts at. While speculation is off its pass is left out, and what
it would have read waits here, until drafting begins again or too much of it waits. Runs inside the vLLM worker; knows
nothing of vLLM.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ComputedRows:
    """What the target computed in one engine step, W values a row, rejected draft tokens included."""

    request_ids: list[str]
    starts: list[int]
    """[R+1], rows of request i are starts[i]:starts[i+1]."""
    num_valid: Tensor
    """[R]: rows of each request, from its first one on, that are part of its text."""
    positions: Tensor
    token_ids: Tensor
    hidden: Tensor
    """[N, W]"""


@dataclass(frozen=True)
class UnreadRun:
    """Rows of one request that follow each other, up to the first one of the step that is drafted for now."""

    request: int
    """Number of the request in that step."""
    first_position: int
    token_ids: Tensor
    """[n]"""
    hidden: Tensor
    """[n, W]"""


class UnreadRows:
    """Steps in the order they were made. `take` empties it."""

    def __init__(self) -> None:
        self._steps: list[ComputedRows] = []
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: ComputedRows) -> None:
        """Keep one step. Its tensors must not change any more."""
        self._steps.append(step)
        self.num_bytes += step.hidden.numel() * step.hidden.element_size()

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
        self.num_bytes = 0

    def take(self, request_ids: Sequence[str], next_positions: Sequence[int]) -> list[UnreadRun]:
        """The runs of these requests that end right before next_positions; everything else is forgotten.

        Rows of other requests belong to finished ones. Rows that do not lead up to next_positions were computed again
        since, after a preemption or an update of the policy.
        """
        number = {name: i for i, name in enumerate(request_ids)}
        ends = list(next_positions)
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in request_ids]
        for step in reversed(self._steps):
            positions, num_valid = step.positions.tolist(), step.num_valid.tolist()
            for row, name in enumerate(step.request_ids):
                start, valid = step.starts[row], num_valid[row]
                i = number.get(name)
                if i is not None and valid and positions[start] + valid == ends[i]:
                    rows = slice(start, start + valid)
                    parts[i].append((step.token_ids[rows], step.hidden[rows]))
                    ends[i] -= valid
        self.clear()
        return [
            UnreadRun(i, ends[i], torch.cat([ids for ids, _ in reversed(p)]), torch.cat([h for _, h in reversed(p)]))
            for i, p in enumerate(parts)
            if p
        ]


def pieces(runs: Sequence[UnreadRun], most_rows: int) -> Iterator[list[tuple[UnreadRun, slice]]]:
    """Groups of parts of runs, of at most most_rows rows together; the parts of one run come in order."""
    group: list[tuple[UnreadRun, slice]] = []
    room = most_rows
    for run in runs:
        start, length = 0, len(run.token_ids)
        while start < length:
            end = min(length, start + room)
            group.append((run, slice(start, end)))
            room -= end - start
            start = end
            if not room:
                yield group
                group, room = [], most_rows
    if group:
        yield group
