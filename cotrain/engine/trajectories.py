"""Rollouts of several turns with tools, on one engine: token in, token out.

A trajectory is one growing list of token ids. A turn sends all of it and appends what was sampled; what the tools answer is encoded alone
and appended too. All turns have one request name, so that the prefix cache serves earlier turns, and the tap's rows grow with them.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from cotrain.engine.engine import RolloutEngine
from cotrain.engine.processes import death_in_words
from cotrain.engine.tools import ToolFailed, Tools, TrajectoryTools
from cotrain.engine.worker import EngineWorker
from cotrain.records import Rollout, RolloutBatch, RolloutRequest, Segment, Turn, derived_seed

TRIES = 2  # how often a trajectory is begun whose tools fail


@dataclass
class Trajectory:
    """What a trajectory has so far."""

    request: RolloutRequest
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    parts: list[Turn] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str = "stop"

    def turn(self, turn: int) -> RolloutRequest:
        """Return the request of the turn of this number, counted from 0."""
        first, seed = self.request, self.request.seed
        seed = derived_seed(seed, turn) if turn and seed is not None else seed
        return RolloutRequest(first.prompt_id, first.sample_index, first.prompt_token_ids + self.token_ids, seed)

    def append(self, made: Rollout) -> None:
        """Append a turn that was generated."""
        start = len(self.token_ids)
        self.parts.append(Turn(start, start + len(made.token_ids), len(made.verification_steps)))
        for versions, _, end in made.segments:
            before = self.segments[-1].end if self.segments else 0
            if self.segments and self.segments[-1].versions == versions:
                before = self.segments.pop().start
            self.segments.append(Segment(versions, before, start + end))
        self.token_ids += made.token_ids
        self.log_probs += made.log_probs
        self.steps += made.verification_steps
        self.texts.append(made.text)

    def observe(self, token_ids: list[int]) -> None:
        """Append what the tools answered."""
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids)

    def rollout(self) -> Rollout:
        *earlier, last = self.segments
        return Rollout(
            prompt_id=self.request.prompt_id,
            sample_index=self.request.sample_index,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            text="\n".join(self.texts),
            finish_reason=self.finish_reason,
            versions=last.versions,
            verification_steps=tuple(self.steps),
            earlier=tuple(earlier),
            parts=tuple(self.parts),
        )


class Played(NamedTuple):
    """A trajectory that has ended."""

    rollout: Rollout
    reward: float
    begun_again: bool  # the tap has rows of both tries
    tool_share: float  # of its time, in which it waited for tools


class TrajectoryEngine(RolloutEngine):
    """A rollout engine whose responses may have several turns."""

    async def play(self, requests: list[RolloutRequest], tap: float, row: dict[str, Any], tools: Tools) -> RolloutBatch:
        """Let the policy and the environment of this row take turns, once for each request. Returns the trajectories with their rewards.

        One whose environment fails is begun again, TRIES times in all, and then left out; RolloutBatch.failures has the reasons.
        """
        self._batches += 1
        started, named = time.perf_counter(), {f"b{self._batches}r{i}": request for i, request in enumerate(requests)}
        failures, tapped, computed = list[str](), await self._start_tapping(named, tap, {}), set[int]()
        drafts = self.spec.drafter_folder is not None
        if drafts:
            await self.on_workers(EngineWorker.begin_trajectories, list(named))
        async with death_in_words(self._engine):
            tries = (
                self._tried(name, request, computed if name in tapped else None, row, tools, failures)
                for name, request in named.items()
            )
            played = dict(zip(named, await asyncio.gather(*tries), strict=True))
        whole = {name: made for name, made in played.items() if made is not None}
        lost = [name for name in tapped if name not in whole or whole[name].begun_again]
        if drafts:
            await self.on_workers(EngineWorker.end_trajectories, list(named), lost)
        rollouts = {name: made.rollout for name, made in whole.items()}
        self._admission.forget(named.keys() - rollouts)
        return await self._batch(
            rollouts,
            tapped.keys() - lost,
            time.perf_counter() - started,
            rewards=[made.reward for made in whole.values()],
            failures=tuple(failures),
            tool_share=fmean(made.tool_share for made in whole.values()) if whole else 0.0,
        )

    async def _tried(
        self, name: str, request: RolloutRequest, computed: set[int] | None, row: dict[str, Any], tools: Tools,
        failures: list[str],
    ) -> Played | None:  # fmt: skip
        """Play a trajectory, and once again if its tools fail. computed: see `_trajectory`; a second try is not tapped."""
        for attempt in range(TRIES):
            own = f"{os.getpid()}-{name}-{attempt}"
            environment, began = tools.of(own, request.sample_index + attempt), time.monotonic()
            which = (own, None) if attempt else (name, computed)
            try:
                trajectory = await self._trajectory(*which, request, row, tools, environment)
                reward = await environment.reward()
            except ToolFailed as failure:
                environment.forget()
                failures.append(str(failure))
                continue
            rollout = trajectory.rollout()
            if tools.sampling is None:
                await self.add_history([rollout])
            return Played(rollout, reward, attempt > 0, environment.seconds / (time.monotonic() - began))
        return None

    async def _trajectory(
        self, name: str, computed: set[int] | None, request: RolloutRequest, row: dict[str, Any], tools: Tools,
        environment: TrajectoryTools,
    ) -> Trajectory:  # fmt: skip
        """Play to the end. name: of the requests of all turns.

        computed: the policy versions with which a tapped trajectory has computed the prompt whole; None if this one is not tapped.
        """
        most, trajectory, versions = self.spec.rollout.max_new_tokens, Trajectory(request), -1
        await environment.begin(row)
        for number in range(tools.max_turns):
            one, policy = trajectory.turn(number), self.versions.policy
            # Rows of other weights are holes, and what others have put into the cache fills none of this trajectory's.
            moved, versions = number > 0 and policy != versions, policy
            room = min(tools.max_turn_tokens, most - len(trajectory.token_ids))
            options = {"max_tokens": room} | (tools.sampling or {})
            if computed is not None and (moved or policy not in computed):
                computed.add(policy)
                options["skip_reading_prefix_cache"] = True
            prompt = {"prompt_token_ids": one.prompt_token_ids}
            queue = await self._engine.add_request(name, prompt, self._sampling(one, options))
            made = self._rollout(one, await queue.get())
            trajectory.append(made)
            if made.finish_reason == "length":
                trajectory.finish_reason = "length"
                return trajectory
            observed = await environment.step(made.text, made.token_ids[-1])
            if observed is None:
                return trajectory
            if number + 1 == tools.max_turns or len(trajectory.token_ids) + len(observed) >= most:
                break
            trajectory.observe(observed)
        trajectory.finish_reason = "length"
        return trajectory
