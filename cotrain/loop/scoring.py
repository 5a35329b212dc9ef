"""Scores finished groups beside generation, one after the other, and replaces a scorer that hangs or dies."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cotrain.actors.rewards import Rewards
from cotrain.loop.reactor import Reactor
from cotrain.process.failures import TaskFailed
from cotrain.records import Prompt


class Scoring:
    """The groups that wait for their rewards, by number."""

    def __init__(
        self,
        rewards: Rewards,
        reactor: Reactor,
        timeout_s: float,
        scored: Callable[[int, list[float] | TaskFailed], None],
        lost: Callable[[int, str], None],
    ):
        """timeout_s: seconds after which a scorer counts as hung. scored: called with a group's number and its rewards.

        lost: called with a group's number and the reason when its scorer hung or died; the group is then no longer scored.
        """
        self._rewards, self._reactor, self._timeout_s = rewards, reactor, timeout_s
        self._when_scored, self._when_lost = scored, lost
        self._waiting: dict[int, tuple[Prompt, list[str]]] = {}
        self._begun: dict[int, Any] = {}  # references of their rewards, in the order in which the scorer works on them
        self.ready = False
        """Whether the scorer has started."""
        self._began = 0.0  # when the scorer began to work on the first of them
        reactor.add(rewards.starting, self._started)

    def add(self, number: int, prompt: Prompt, responses: list[str]) -> None:
        """Score the responses to a group's prompt."""
        self._waiting[number] = prompt, responses
        if self.ready:
            self._begin(number)

    def check_time(self) -> None:
        """Replace a scorer that has worked on one group for too long. Called regularly."""
        late = time.monotonic() - self._began > self._timeout_s
        if self._begun and late and not self._reactor.is_there(next(iter(self._begun.values()))):
            self._replace("the scorer did not answer")

    def _begin(self, number: int) -> None:
        if not self._begun:
            self._began = time.monotonic()
        self._begun[number] = reference = self._rewards.begin(*self._waiting[number])
        self._reactor.add(reference, partial(self._scored, number), lambda _: self._replace("the scorer died"))

    def _started(self, _: None) -> None:
        self.ready = True
        for number in self._waiting:
            self._begin(number)

    def _scored(self, number: int, rewards: list[float] | TaskFailed) -> None:
        del self._begun[number], self._waiting[number]
        self._began = time.monotonic()
        self._when_scored(number, rewards)

    def _replace(self, reason: str) -> None:
        """Give up the group that was being scored, and let a new process score those that wait behind it."""
        lost = next(iter(self._begun))
        for reference in self._begun.values():
            self._reactor.drop(reference)
        self._begun.clear()
        del self._waiting[lost]
        self.ready = False
        self._reactor.add(self._rewards.restart(), self._started)
        self._when_lost(lost, reason)
