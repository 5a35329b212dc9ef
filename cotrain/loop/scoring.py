"""Scores finished groups beside generation, and replaces a scorer that hangs or dies. A scorer works on one after the other."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cotrain.actors.rewards import Rewards
from cotrain.loop.reactor import Reactor
from cotrain.process.failures import TaskFailed
from cotrain.records import Prompt


@dataclass
class Scorer:
    """A scoring process, and what it works on."""

    rewards: Rewards
    ready: bool = False  # whether it has started
    begun: dict[int, Any] = field(default_factory=dict)
    """References of the rewards of its groups, in the order in which it works on them."""
    began: float = 0.0  # when it began to work on the first of them


class Scoring:
    """The groups that wait for their rewards, by number."""

    def __init__(
        self,
        rewards: Sequence[Rewards],
        reactor: Reactor,
        timeout_s: float,
        scored: Callable[[int, list[float] | TaskFailed, float], None],
        lost: Callable[[int, str], None],
    ):
        """timeout_s: seconds after which a scorer counts as hung.

        scored: called with a group's number, its rewards, and the time when a scorer began on it.
        lost: called with a group's number and the reason when its scorer hung or died; the group is then no longer scored.
        """
        self._reactor, self._timeout_s = reactor, timeout_s
        self._when_scored, self._when_lost = scored, lost
        self._waiting: dict[int, tuple[Prompt, list[str]]] = {}
        self._scorers = [Scorer(one) for one in rewards]
        for scorer in self._scorers:
            reactor.add(scorer.rewards.starting, partial(self._started, scorer))

    def add(self, number: int, prompt: Prompt, responses: list[str]) -> None:
        """Score the responses to a group's prompt."""
        self._waiting[number] = prompt, responses
        self._hand_out([number])

    def check_time(self) -> None:
        """Replace each scorer that has worked on one group for too long. Called regularly."""
        for scorer in self._scorers:
            late = time.monotonic() - scorer.began > self._timeout_s
            if scorer.begun and late and not self._reactor.is_there(next(iter(scorer.begun.values()))):
                self._replace(scorer, "the scorer did not answer")

    def _hand_out(self, numbers: Iterable[int]) -> None:
        """Give each group to the scorer that has the fewest; all of them wait while no scorer is ready."""
        ready = [scorer for scorer in self._scorers if scorer.ready]
        for number in numbers if ready else ():
            self._begin(min(ready, key=lambda scorer: len(scorer.begun)), number)

    def _begin(self, scorer: Scorer, number: int) -> None:
        if not scorer.begun:
            scorer.began = time.monotonic()
        scorer.begun[number] = reference = scorer.rewards.begin(*self._waiting[number])
        scored = partial(self._scored, scorer, number)
        self._reactor.add(reference, scored, lambda _: self._replace(scorer, "the scorer died"))

    def _started(self, scorer: Scorer, _: None) -> None:
        scorer.ready = True
        self._hand_out(number for number in self._waiting if not any(number in one.begun for one in self._scorers))

    def _scored(self, scorer: Scorer, number: int, rewards: list[float] | TaskFailed) -> None:
        del scorer.begun[number], self._waiting[number]
        began, scorer.began = scorer.began, time.monotonic()
        self._when_scored(number, rewards, began)

    def _replace(self, scorer: Scorer, reason: str) -> None:
        """Give up the group that was being scored, hand out those that wait behind it, and start a new process."""
        lost, *behind = scorer.begun
        for reference in scorer.begun.values():
            self._reactor.drop(reference)
        scorer.begun.clear()
        del self._waiting[lost]
        scorer.ready = False
        self._reactor.add(scorer.rewards.restart(), partial(self._started, scorer))
        self._hand_out(behind)
        self._when_lost(lost, reason)
