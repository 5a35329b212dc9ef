"""Scores finished groups beside generation, and replaces a scorer that hangs or dies. A scorer works on one group at a time."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cotrain.actors.rewards import Rewards
from cotrain.loop.ledger import Group
from cotrain.loop.reactor import Reactor
from cotrain.process.failures import RunFailure, TaskFailed


@dataclass
class Scorer:
    """A scoring process, and what it works on."""

    rewards: Rewards
    ready: bool = False  # whether it has started
    group: Group | None = None
    reference: Any = None  # reference of that group's rewards


class Scoring:
    """The groups that wait for their rewards, first in, first out."""

    def __init__(
        self,
        rewards: Sequence[Rewards],
        reactor: Reactor,
        timeout_s: float,
        scored: Callable[[Group, list[float] | TaskFailed], None],
        lost: Callable[[Group, str], None],
    ):
        """timeout_s: seconds after which a scorer counts as hung. scored: called with a group and its rewards.

        lost: called with a group and the reason when its scorer hung or died; the group is then no longer scored.
        """
        self._reactor, self._timeout_s = reactor, timeout_s
        self._when_scored, self._when_lost = scored, lost
        self._waiting = deque[Group]()
        self._scorers = [Scorer(one) for one in rewards]
        for scorer in self._scorers:
            reactor.add(scorer.rewards.starting, partial(self._started, scorer))

    def add(self, group: Group) -> None:
        """Score the responses of a group."""
        self._waiting.append(group)
        self._hand_out()

    def check_time(self) -> None:
        """Replace each scorer that has worked on its group for too long. Called regularly."""
        for scorer in self._scorers:
            late = scorer.group is not None and time.monotonic() - scorer.group.scorer_began_at > self._timeout_s
            if late and not self._reactor.is_there(scorer.reference):
                self._replace(scorer, "the scorer did not answer")

    def _hand_out(self) -> None:
        for scorer in self._scorers:
            if scorer.ready and scorer.group is None and self._waiting:
                scorer.group = self._waiting.popleft()
                scorer.group.scorer_began_at = time.monotonic()
                responses = [rollout.text for rollout in scorer.group.rollouts]
                scorer.reference = scorer.rewards.begin(scorer.group.prompt, responses)
                self._reactor.add(scorer.reference, partial(self._scored, scorer), partial(self._died, scorer))

    def _started(self, scorer: Scorer, _: None) -> None:
        scorer.ready = True
        self._hand_out()

    def _scored(self, scorer: Scorer, rewards: list[float] | TaskFailed) -> None:
        group, scorer.group = scorer.group, None
        assert group is not None
        self._hand_out()
        self._when_scored(group, rewards)

    def _died(self, scorer: Scorer, _: RunFailure) -> None:
        self._replace(scorer, "the scorer died")

    def _replace(self, scorer: Scorer, reason: str) -> None:
        """Give up the group that is being scored, and start a new process. The other scorers take those that wait."""
        group, scorer.group, scorer.ready = scorer.group, None, False
        assert group is not None
        self._reactor.drop(scorer.reference)
        self._reactor.add(scorer.rewards.restart(), partial(self._started, scorer))
        self._when_lost(group, reason)
