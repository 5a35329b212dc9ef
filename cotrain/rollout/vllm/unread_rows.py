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
class StepRows:
    """What the target computed in one engine step, rejected draft tokens included: N rows of R requests."""

    request_ids: list[str]
    starts: list[int]  # [R+1], rows of request i are starts[i]:starts[i+1]
    first_positions: list[int]  # [R], position of each request's first row; the others follow it
    token_ids: Tensor  # [N]
    hidden: Tensor  # [N, W]


@dataclass(frozen=True)
class UnreadRun:
    """Rows of one request that follow each other, up to the first one of the step that is about to be drafted for."""

    request: int  # its number in that step
    first_position: int
    token_ids: Tensor  # [n]
    hidden: Tensor  # [n, W]


class UnreadRows:
    """Steps in the order they were made. `take` empties it."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepRows, Tensor]] = []
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: StepRows, num_valid: Tensor) -> None:
        """Keep one step, whose tensors must not change any more.

        num_valid [R]: rows of each request, from its first one on, that are part of its text.
        """
        self._steps.append((step, num_valid))
        self.num_bytes += step.hidden.nbytes

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
        for step, num_valid in reversed(self._steps):
            rows = zip(step.request_ids, step.starts, step.first_positions, num_valid.tolist(), strict=False)
            for name, start, position, valid in rows:
                i = number.get(name)
                if i is not None and valid and position + valid == ends[i]:
                    own = slice(start, start + valid)
                    parts[i].append((step.token_ids[own], step.hidden[own]))
                    ends[i] -= valid
        self.clear()
        joined = [[torch.cat(tensors[::-1]) for tensors in zip(*p, strict=True)] for p in parts]
        return [UnreadRun(i, ends[i], *tensors) for i, tensors in enumerate(joined) if tensors]


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
