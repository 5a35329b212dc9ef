"""Which groups are under way, and which may begin. Pure: no clock, no Ray, no engine.

Groups are numbered in the order in which they are admitted, and trained on in the same order, P in each step: group g
belongs to step g // P + 1, whatever happens to it. It is admitted when at least g // P - L steps are served, and trained
on when g // P are, so no token of it is older than L policy versions (docs/asynchronous.md). A group that is lost starts
over in its place, later than before, and so it is younger.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cotrain.process.failures import RunFailure
from cotrain.records import Rollout, Versions

State = Literal["admitted", "dispatched", "finished", "scored", "taken"]

NEXT: dict[State, State] = {"admitted": "dispatched", "dispatched": "finished", "finished": "scored", "scored": "taken"}
"""The states of a group in their order. A taken group is forgotten when its slot is released."""

MOST_LOST, MOST_LOST_SHARE = 10, 0.1
"""A run ends when more groups are lost than this number plus this share of those admitted: so many are no accident."""


ENGINE_DIED = "its engine died"
"""A reason that does not count here: one death takes all groups of an engine, and cluster.min_engines bounds deaths."""


@dataclass
class Group:
    """One prompt of the stream, on its way to the learner."""

    number: int
    state: State = "admitted"
    attempt: int = 0
    """How often it was lost and started over."""


class Ledger:
    """The groups that hold a slot, by number."""

    def __init__(self, prompts_per_step: int, max_policy_lag: int, total_steps: int, served: int = 0):
        """served: steps whose weights are served. Their groups are gone; the next one begins behind them."""
        self._prompts_per_step, self._max_policy_lag = prompts_per_step, max_policy_lag
        self._total = total_steps * prompts_per_step
        self.served = served
        self.admitted = served * prompts_per_step
        """Groups admitted so far, those of earlier steps included."""
        self.lost: Counter[str] = Counter()
        """Groups that were started over, by reason."""
        self.groups: dict[int, Group] = {}

    def admit(self) -> list[Group]:
        """Admit as many groups as there are free slots for. No group is admitted that no step would train on."""
        bound = (self._max_policy_lag + 1 + self.served) * self._prompts_per_step
        new = [Group(number) for number in range(self.admitted, min(bound, self._total))]
        self.groups |= {group.number: group for group in new}
        self.admitted += len(new)
        return new

    def move(self, number: int, state: State) -> Group:
        """A group goes on to its next state. Raises ValueError for any other."""
        group = self.groups[number]
        if NEXT.get(group.state) != state:
            raise ValueError(f"group {number} cannot go from {group.state} to {state}")
        group.state = state
        return group

    def restore(self, number: int) -> None:
        """An admitted group was scored before a resume."""
        self.groups[number].state = "scored"

    def lose(self, number: int, reason: str) -> Group:
        """A group starts over in its place. Raises RunFailure when too many do."""
        group = self.groups[number]
        if group.state == "taken":
            raise ValueError(f"group {number} is trained on and cannot be lost")
        self.lost[reason] += 1
        group.state, group.attempt = "admitted", group.attempt + 1
        counted = {why: count for why, count in self.lost.items() if why != ENGINE_DIED}
        if sum(counted.values()) > MOST_LOST + MOST_LOST_SHARE * self.admitted:
            reasons = ", ".join(f"{count} x {why}" for why, count in counted.items())
            raise RunFailure(f"{sum(counted.values())} of {self.admitted} groups were lost ({reasons})")
        return group

    def take(self) -> list[int] | None:
        """The next step's groups, once all of them are scored; None before."""
        first = self.served * self._prompts_per_step
        numbers = range(first, first + self._prompts_per_step)
        if any(number not in self.groups or self.groups[number].state != "scored" for number in numbers):
            return None
        for number in numbers:
            self.move(number, "taken")
        return list(numbers)

    def release(self) -> list[int]:
        """The slots of a step whose weights are served (or whose policy is not trained) are free again. Returns its groups."""
        taken = [number for number, group in self.groups.items() if group.state == "taken"]
        if len(taken) != self._prompts_per_step:
            raise ValueError(f"{len(taken)} groups are taken, a step has {self._prompts_per_step}")
        for number in taken:
            del self.groups[number]
        self.served += 1
        return taken

    def count(self, *states: State) -> int:
        """How many groups are in any of these states."""
        return sum(group.state in states for group in self.groups.values())

    def describe(self) -> str:
        """What every group is at, for a message."""
        states = Counter(group.state for group in self.groups.values())
        oldest = min(self.groups, default=None)
        what = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        return f"groups: {what}; oldest {oldest}, admitted {self.admitted}, steps served {self.served}"


def check_lag(rollouts: Sequence[Rollout], served: Versions, max_policy_lag: int) -> None:
    """Raise RunFailure for a rollout that is older than the bound, or whose policy versions are none that were served.

    Admission makes both impossible, so that either is a fault of the engine or of cotrain.
    """
    for rollout in rollouts:
        name = f"rollout {rollout.prompt_id}/{rollout.sample_index}"
        versions = [segment.versions for segment in rollout.segments]
        told = f"{name} was generated by {', '.join(map(str, versions))}"
        policies = [v.policy for v in versions]
        if policies != sorted(policies):
            raise RunFailure(f"version_regressed: {told}; policy versions never go back")
        if policies[-1] > served.policy:
            raise RunFailure(f"unknown_version: {told}, and the newest that was served is {served}")
        if served.policy - policies[0] > max_policy_lag:
            raise RunFailure(f"lag_exceeded: {told}, and step trains {served}; the bound is {max_policy_lag}")
