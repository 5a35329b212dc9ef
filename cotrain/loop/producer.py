"""Takes groups from prompt to learner: admits them, sends them to engines, has them scored, and repeats lost ones.

The ledger decides what a group may do, and this module does it. Each group is a call of its own, and is scored as soon as it
has ended. Without lag the groups of a step enter their engine together, so that its batches are always the same.
"""

import random
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from cotrain.config.schema import RunConfig
from cotrain.loop.ledger import ENGINE_DIED, Group, Ledger, LengthHistory
from cotrain.loop.roles import Roles
from cotrain.loop.scoring import Scoring
from cotrain.loop.step import Windows
from cotrain.process.failures import RunFailure, TaskFailed
from cotrain.records import Rollout, RolloutBatch, RolloutRequest, derived_seed
from cotrain.run.checkpoint import RunState
from cotrain.run.rows import RowFile
from cotrain.tasks.base import Task
from cotrain.tasks.prompts import PromptOrder, encode_prompt

SAME_PROMPT_TRIES = 2
"""Number of attempts to generate a group with its own prompt; after that, another prompt takes its place."""

FEWEST_SAMPLES, TOOLS_FAILED = 2, "its tools failed"
"""A group with fewer trajectories has nothing to compare one with, and is generated again."""

MOST_IN_TOOLS = 0.75
"""Share of its requests at most that an engine is expected to have in tools."""

FILL = 1.25
"""With lag, an engine gets groups until it has this many times the requests that it can run at once, so that it never runs
short. Other groups wait here: the later a request starts, the newer its weights, and an engine that dies loses less."""


@dataclass
class Prompts:
    """The task, the order in which its prompts are drawn, and the policy's tokenizer."""

    task: Task
    order: PromptOrder
    tokenizer: Any


class Producer:
    """Generates and scores the groups of a run, and hands them out step by step."""

    def __init__(self, config: RunConfig, roles: Roles, prompts: Prompts, events: RowFile, start: RunState):
        """start: where the run stands. Its stream is what `state` returned then; None for a new run."""
        new: dict[str, Any] = {
            "groups": [],
            "lost": {},
            "lost_features": 0,
            "failed_trajectories": 0,
            "lengths": {"logs": {}},
        }
        saved = new | (start.stream or {})
        self._config, self._roles, self._prompts, self._events = config, roles, prompts, events
        self._tap = 0.0  # share of the rollouts whose hidden states are wanted
        rollout, stream = config.rollout, config.stream
        self.ledger = Ledger(rollout.prompts_per_step, stream.max_policy_lag, config.steps, start.step)
        self.ledger.lost.update(saved["lost"])
        self.ledger.failed_trajectories = saved["failed_trajectories"]
        self.windows = Windows(roles, stream.max_policy_lag > 0, saved["lost_features"])
        self.lengths = LengthHistory(saved["lengths"]["logs"])  # how long the responses to each prompt were
        self._saved = {row["number"]: row for row in saved["groups"]}
        """Groups that were scored before the run was resumed, until they are admitted again."""
        self._queue: deque[Group] = deque()
        self._outstanding = [0] * rollout.num_engines  # requests that each engine has not finished
        self._scoring = Scoring(roles.rewards, roles.reactor, stream.reward_timeout_s, self._scored, self._start_over)
        roles.reactor.watch(self._tick, self.ledger.describe)

    def admit(self, tap: float) -> None:
        """Admit a group for each free slot, and dispatch groups while engines have room. tap: share of their rollouts to tap."""
        self._tap = tap
        begins = []
        for group in self.ledger.admit():
            if (row := self._saved.pop(group.number, None)) is not None:
                group.index, group.prompt = row["index"], self._prompts.task[row["index"]]
                group.rollouts = TypeAdapter(list[Rollout]).validate_python(row["rollouts"])
                group.rewards = row["rewards"]
                self.ledger.restore(group)
                self._event("restored", group.number)
                continue
            self._draw(group)
            self._event("admitted", group.number)
            begins.append(group)
        self._queue.extend(sorted(begins, key=self._rank))
        self._dispatch()

    def _rank(self, group: Group) -> tuple[float, ...]:
        """Sort key: by step, and within a step the longest expected responses first if rollout.order says so."""
        expected = 0.0
        if self._config.rollout.order == "longest_first":
            expected = self.lengths.expected(group.prompt.id)
        return group.number // self._config.rollout.prompts_per_step, -expected, group.number

    def take(self) -> list[Group] | None:
        """See Ledger.take."""
        groups = self.ledger.take()
        for group in groups or ():
            self._event("taken", group.number)
        return groups

    def release(self) -> None:
        """Free the slots of the taken step, now that its weights are served."""
        for number in self.ledger.release():
            self._event("released", number)

    def metrics(self) -> dict[str, float]:
        """The number of groups in each state."""
        count = self.ledger.count
        return {
            "stream/groups_waiting": count("admitted"),
            "stream/groups_running": count("dispatched"),
            "stream/groups_finished": count("finished", "scored"),
        }

    def losses(self) -> dict[str, float]:
        """The number of groups and trajectories that were lost so far, and of rollouts whose hidden states were."""
        return {
            "stream/lost_groups": self.ledger.lost.total(),
            "stream/failed_trajectories": self.ledger.failed_trajectories,
            "drafter/lost_features": self.windows.lost_features,
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the groups that are scored but not yet trained on, the length history, and what was lost.

        All other groups start over after a resume. Hidden states that no window has handed out yet count as lost.
        """
        rows = [
            {"number": group.number, "index": group.index, "rewards": group.rewards}
            | {"rollouts": [asdict(rollout) for rollout in group.rollouts]}
            for group in self.ledger.groups.values()
            if group.state == "scored"
        ]
        lost: dict[str, Any] = {"lost": dict(self.ledger.lost), "lost_features": self.windows.state()}
        lost["failed_trajectories"] = self.ledger.failed_trajectories
        return {"groups": rows, "lengths": {"logs": self.lengths.logs}} | lost

    def _dispatch(self) -> None:
        together = self._config.stream.max_policy_lag == 0
        of_engine: dict[int, list[tuple[Group, list[RolloutRequest]]]] = defaultdict(list)
        while self._queue and (engine := self._place()) is not None:
            group = self._queue.popleft()
            try:
                of_engine[engine].append((group, self._requests(group)))
            except ValueError as error:
                self.ledger.fail(group.number, TaskFailed(str(error)))
                continue
            self._outstanding[engine] += self._config.rollout.samples_per_prompt
        for engine, groups in of_engine.items():
            for place, (group, requests) in enumerate(groups):
                self._begin(engine, group, requests, (place, len(groups)) if together else (0, 1))

    def _place(self) -> int | None:
        """The engine that gets the next group; None while all of them have enough requests."""
        engine = min(self._roles.engines.in_dispatch, key=self._outstanding.__getitem__)
        waits = self._config.stream.max_policy_lag > 0
        # Those that wait for tools leave their places to others.
        full = (
            self._outstanding[engine] * (1 - min(self.windows.tool_share, MOST_IN_TOOLS))
            >= FILL * self._config.rollout.max_num_seqs
        )
        return None if waits and full else engine

    def _begin(self, engine: int, group: Group, requests: list[RolloutRequest], together: tuple[int, int]) -> None:
        self.ledger.move(group.number, "dispatched")
        self._event("dispatched", group.number, engine=engine, attempt=group.attempt)
        answer = group.prompt.answer
        reference = self._roles.engines.begin_generate(engine, requests, self._tap, together, answer)
        finished = partial(self._finished, engine, group.number, together[0], reference)
        self._roles.reactor.add(reference, finished, partial(self._engine_died, engine, group.number))

    def _requests(self, group: Group) -> list[RolloutRequest]:
        rollout, seed, prompt = self._config.rollout, self._config.seed, group.prompt
        token_ids = encode_prompt(self._prompts.tokenizer, prompt, rollout.max_prompt_tokens)
        parts = [seed, group.number // rollout.prompts_per_step + 1, prompt.id]
        attempt = [group.attempt] if group.attempt else []
        seeded = rollout.draft_sample_method == "greedy"
        return [
            RolloutRequest(prompt.id, i, token_ids, derived_seed(*parts, i, *attempt) if seeded else None)
            for i in range(rollout.samples_per_prompt)
        ]

    def _draw(self, group: Group) -> None:
        """Set a group's prompt: its own, or another one after SAME_PROMPT_TRIES attempts."""
        step, place = divmod(group.number, self._config.rollout.prompts_per_step)
        if group.attempt < SAME_PROMPT_TRIES:
            group.index = self._prompts.order.prompt(step + 1, place)
        else:
            own = self._prompts.order.step(step + 1)
            used = {other.index for other in self.ledger.groups.values()}
            others = sorted(set(range(len(self._prompts.task))) - {*own, *used}) or own
            group.index = random.Random(f"{self._config.seed}/{group.number}/{group.attempt}").choice(others)
        group.prompt = self._prompts.task[group.index]

    def _finished(self, engine: int, number: int, place: int, reference: Any, batch: RolloutBatch) -> None:
        self._outstanding[engine] -= self._config.rollout.samples_per_prompt
        for reason in batch.failures:
            self.ledger.failed_trajectories += 1
            self._event("trajectory failed", number, reason=reason)
        if batch.failures and len(batch.rollouts) < FEWEST_SAMPLES:
            self._roles.nodes.remove_all(batch.features)
            return self._start_over(self.ledger.groups[number], f"{TOOLS_FAILED} ({batch.failures[-1]})")
        self.windows.add(engine, batch, place)
        self._roles.engines.share_history(engine, reference)
        group = self.ledger.move(number, "finished")
        group.rollouts, group.finished_at = batch.rollouts, time.monotonic()
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        told = {"tokens": sum(lengths), "versions": str(group.rollouts[-1].versions)}
        told["prompt_tokens"] = len(group.rollouts[-1].prompt_token_ids)
        self._event("finished", number, engine=engine, prompt=group.prompt.id, lengths=lengths, **told)
        if self._roles.engines.tools is None:
            self._scoring.add(group)
        else:
            group.scorer_began_at = group.finished_at
            self._scored(group, batch.rewards)
        self._dispatch()

    def _engine_died(self, engine: int, number: int, failure: RunFailure) -> None:
        """Have the engine restarted, and let a group of it start over on another one."""
        self._roles.engines.lose(engine, failure)
        self._outstanding[engine] -= self._config.rollout.samples_per_prompt
        self._start_over(self.ledger.groups[number], ENGINE_DIED, engine=engine)

    def _scored(self, group: Group, rewards: list[float] | TaskFailed) -> None:
        if isinstance(rewards, TaskFailed):
            return self.ledger.fail(group.number, rewards)
        group.rewards = rewards
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        cut = [rollout.finish_reason == "length" for rollout in group.rollouts]
        # Not when it finished, since a group that is not scored starts over after a resume.
        self.lengths.observe(group.prompt.id, lengths, cut)
        self.ledger.move(group.number, "scored")
        self._event("scored", group.number, reward=sum(rewards) / len(rewards))

    def _start_over(self, group: Group, reason: str, **fields: Any) -> None:
        self.ledger.lose(group.number, reason)
        self._draw(group)
        self._queue.appendleft(group)
        self._event("lost", group.number, reason=reason, **fields)
        self._dispatch()

    def _tick(self) -> None:
        self._scoring.check_time()
        self._dispatch()  # an engine may have come back

    def _event(self, event: str, number: int, **fields: Any) -> None:
        step = number // self._config.rollout.prompts_per_step + 1
        self._events.write(step, {"time": time.time(), "event": event, "group": number} | fields)
