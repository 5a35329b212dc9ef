"""Keeps track of which groups are in progress, which may start, and how long they may take. Pure: no clock, no Ray, no engine.

Groups are numbered in order of admission and trained on in the same order, P in each step: group g always belongs to
step g // P + 1. It is admitted once the weights of at least g // P - L steps are served, and trained on once those of
g // P steps are, so none of its tokens is older than L policy versions (docs/guide/asynchronous.md). A group that is lost is
generated again under the same number. It starts later then, so its tokens are newer and the bound still holds.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cotrain.process.failures import RunFailure, TaskFailed
from cotrain.records import Prompt, Rollout, Versions

State = Literal["admitted", "dispatched", "finished", "scored", "taken"]

NEXT: dict[State, State] = {"admitted": "dispatched", "dispatched": "finished", "finished": "scored", "scored": "taken"}
"""Each state of a group and the one that follows it. A taken group is removed when its slot is released."""

NO_PROMPT = Prompt("", [], None)

MOST_LOST, MOST_LOST_SHARE = 10, 0.1
"""A run ends when it loses more groups than this number plus this share of the admitted ones: that many are no accident."""

ENGINE_DIED = "its engine died"
"""A reason that does not count: one death loses all groups of an engine, and cluster.min_engines already limits deaths."""

NEWEST_WEIGHT = 0.5  # weight of a prompt's newest samples in its moving average: an older policy wrote the other ones


@dataclass
class Group:
    """One prompt with all its samples, on the way to the learner. The ledger uses its number, state and attempts alone."""

    number: int
    state: State = "admitted"
    attempt: int = 0  # how many times it was lost and started over
    index: int = -1  # index of its prompt in the task
    prompt: Prompt = NO_PROMPT
    rollouts: list[Rollout] = field(default_factory=list)  # those of its last attempt, once they are there
    rewards: list[float] = field(default_factory=list)
    finished_at: float = 0.0  # when its responses were there; 0 in a group that was restored
    scorer_began_at: float = 0.0  # when a scorer began on them


class Ledger:
    """The groups that hold one of the (max_policy_lag + 1) * prompts_per_step slots, by number."""

    def __init__(self, prompts_per_step: int, max_policy_lag: int, total_steps: int, served: int = 0):
        """served: number of steps whose weights are already served. Their groups are done; numbering continues after them."""
        self._prompts_per_step, self._max_policy_lag = prompts_per_step, max_policy_lag
        self._total = total_steps * prompts_per_step
        self.served = served
        self.admitted = served * prompts_per_step  # groups admitted so far, those of earlier steps included
        self.lost: Counter[str] = Counter()  # groups that were started over, by reason
        self.failed_trajectories = 0  # each time that their tools failed
        self.groups: dict[int, Group] = {}
        self._scored: Counter[int] = Counter()  # scored groups by step, counted from 0
        self._failed: dict[int, dict[int, TaskFailed]] = defaultdict(dict)  # by step and group

    def admit(self) -> list[Group]:
        """Admit a group for each free slot, but none beyond the last step of the run. Returns the new groups."""
        bound = (self._max_policy_lag + 1 + self.served) * self._prompts_per_step
        new = [Group(number) for number in range(self.admitted, min(bound, self._total))]
        self.groups |= {group.number: group for group in new}
        self.admitted += len(new)
        return new

    def move(self, number: int, state: State) -> Group:
        """Move a group to `state`. Raises ValueError unless that is its next state."""
        group = self.groups[number]
        if NEXT.get(group.state) != state:
            raise ValueError(f"group {number} cannot go from {group.state} to {state}")
        self._put(group, state)
        return group

    def restore(self, group: Group) -> None:
        """Mark an admitted group as scored, because it was scored before the run was resumed."""
        self._put(group, "scored")

    def lose(self, number: int, reason: str) -> Group:
        """Start a group over under the same number. Raises RunFailure when too many were lost."""
        group = self.groups[number]
        self.lost[reason] += 1
        self._put(group, "admitted")
        group.attempt += 1
        counted = {why: count for why, count in self.lost.items() if why != ENGINE_DIED}
        if sum(counted.values()) > MOST_LOST + MOST_LOST_SHARE * self.admitted:
            reasons = ", ".join(f"{count} x {why}" for why, count in counted.items())
            raise RunFailure(f"{sum(counted.values())} of {self.admitted} groups were lost ({reasons})")
        return group

    def fail(self, number: int, failure: TaskFailed) -> None:
        """Note that the prompt or the reward of a group has failed, which ends the run in the group's step."""
        self._failed[number // self._prompts_per_step][number] = failure

    def take(self) -> list[Group] | None:
        """Mark the next step's groups as taken and return them in order; None until all of them are scored.

        Raises the TaskFailed of the first that has failed, when all that are not scored have failed.
        """
        failed = self._failed.get(self.served, {})
        if self._scored[self.served] + len(failed) < self._prompts_per_step:
            return None
        if failed:
            raise failed[min(failed)]
        first = self.served * self._prompts_per_step
        return [self.move(number, "taken") for number in range(first, first + self._prompts_per_step)]

    def release(self) -> list[int]:
        """Free the slots of the taken step once its weights are served (or the policy is not trained). Returns its groups."""
        taken = [number for number, group in self.groups.items() if group.state == "taken"]
        if len(taken) != self._prompts_per_step:
            raise ValueError(f"{len(taken)} groups are taken, a step has {self._prompts_per_step}")
        for number in taken:
            del self.groups[number]
        del self._scored[self.served]
        self.served += 1
        return taken

    def count(self, *states: State) -> int:
        """How many groups are in any of these states."""
        return sum(group.state in states for group in self.groups.values())

    def describe(self) -> str:
        """Say how many groups are in each state, for an error message."""
        oldest = min(self.groups, default=None)
        states = Counter(group.state for group in self.groups.values())
        what = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        return f"groups: {what}; oldest {oldest}, admitted {self.admitted}, steps served {self.served}"

    def _put(self, group: Group, state: State) -> None:
        """Change a group's state, and count the scored groups of its step, which `take` asks for after every result."""
        self._scored[group.number // self._prompts_per_step] += (state == "scored") - (group.state == "scored")
        group.state = state


def reward_queue_s(groups: Sequence[Group]) -> float:
    """Return the seconds after the last response of these groups in which one of them waited for a busy scorer."""
    return max(0.0, max(group.scorer_began_at for group in groups) - max(group.finished_at for group in groups))


def check_lag(rollouts: Sequence[Rollout], served: Versions, max_policy_lag: int) -> None:
    """Raise RunFailure for a rollout older than max_policy_lag, or whose policy versions go back or were never served.

    None of this can happen when groups are admitted as above, so a failure is a bug in the engine or in cotrain.
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


class LengthHistory:
    """Predicts response lengths by a moving average of the log length for each prompt, so that the longest can begin first.

    The length of a truncated response is a lower bound. Averages are geometric means, the medians of log-normal lengths.
    """

    def __init__(self, logs: Mapping[str, float] | None = None) -> None:
        """logs: those of an earlier history to continue from."""
        self.logs = dict(logs or {})  # the average of each prompt
        self._overall: float | None = None  # the mean over prompts; None when it must be computed again

    def expected(self, prompt_id: str) -> float:
        """Expected response tokens for this prompt, or for any prompt if this one is new; 1 before the first observation."""
        if self._overall is None:  # math.fsum does not depend on the order in which groups were scored
            self._overall = math.fsum(self.logs.values()) / max(1, len(self.logs))
        return math.exp(self.logs.get(prompt_id, self._overall))

    def observe(self, prompt_id: str, lengths: Sequence[int], truncated: Sequence[bool]) -> None:
        """Learn from the lengths of a prompt's samples. If half of them are truncated, at least the longest is expected next."""
        known = self.logs.get(prompt_id)
        logs = [math.log(max(1, length)) for length in lengths]
        newest = sum(logs) / len(logs)
        average = newest if known is None else known + NEWEST_WEIGHT * (newest - known)
        self.logs[prompt_id] = max(average, max(logs)) if 2 * sum(truncated) >= len(logs) else average
        self._overall = None
