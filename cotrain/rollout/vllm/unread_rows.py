"""What the drafter has not read yet: rows of engine steps that drafted nothing.

A drafter attends to every position before the one it drafts at. While speculation is off its pass is left out, and what
it would have read waits here, until drafting begins again or too much of it waits. Runs inside the vLLM worker; knows
nothing of vLLM.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """What the target computed of one request at n successive positions."""

    request: str
    first_position: int
    token_ids: Tensor  # [n]
    hidden: Tensor  # [n, W]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first_position + len(self.hidden)


class UnreadRows:
    """Rows of several requests, each in the order of its text."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Rows]] = {}
        self.num_bytes = 0

    def add(self, rows: Rows) -> None:
        """Keep rows whose tensors must not change any more. Earlier ones that they do not continue are forgotten."""
        run = self._runs.setdefault(rows.request, [])
        if run and run[-1].end != rows.first_position:
            run.clear()
        run.append(rows)
        self.num_bytes += rows.hidden.nbytes

    def clear(self) -> None:
        """Forget all."""
        self._runs.clear()
        self.num_bytes = 0

    def take(self, step: Sequence[Rows]) -> list[Rows]:
        """What leads up to the rows of a step: each request's own in one piece. All else is forgotten.

        The token that follows is added, so that there is one token more than hidden states. A request is computed
        again after a preemption or an update of the policy, and then needs only what lies before its new first row.
        """
        found = []
        for rows in step:
            run = self._runs.get(rows.request)
            if run and run[0].first_position < rows.first_position <= run[-1].end:
                length = rows.first_position - run[0].first_position
                token_ids = torch.cat([part.token_ids for part in run])[:length]
                hidden = torch.cat([part.hidden for part in run])[:length]
                followed = torch.cat([token_ids, rows.token_ids[:1]])
                found.append(Rows(rows.request, run[0].first_position, followed, hidden))
        self.clear()
        return found


def passes(runs: Sequence[Rows], most_rows: int) -> Iterator[list[Rows]]:
    """What `take` found, in groups of at most most_rows rows together, of which each run has an equal share."""
    share = most_rows // max(1, len(runs))
    for start in range(0, max((len(run.hidden) for run in runs), default=0), share):
        stop = start + share
        yield [
            Rows(run.request, run.first_position + start, run.token_ids[start : stop + 1], run.hidden[start:stop])
            for run in runs
            if start < len(run.hidden)
        ]
