"""The one client of all rollout engines. All calls but `start`, `begin_generate` and `share_history` wait."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate

from cotrain.actors.policy import Policy
from cotrain.actors.replicas import Method, Replicas, Watch
from cotrain.config.schema import RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.speculation.draft_length import DraftLengths
from cotrain.engine.tools import Tools
from cotrain.engine.trajectories import TrajectoryEngine
from cotrain.engine.worker import EngineWorker
from cotrain.process.calls import P, Reply, T
from cotrain.process.cluster import Cluster
from cotrain.process.failures import RunFailure
from cotrain.records import Rollout, RolloutBatch, RolloutRequest, SwapReport, WeightPayload
from cotrain.transport.nodes import Nodes
from cotrain.weights.payload import WeightUpdateRefused
from cotrain.weights.versions import CurrentWeights

KEPT_DRAFTER = "kept/rank_0/drafter.safetensors"
"""File in an engine's folder: the drafter that the engine was last sent, see ServedWeights."""

HISTORY = "history.safetensors"
"""File with the history that engines draft from: in a checkpoint, and in an engine's folder for another one that is started again."""

UPDATE_SECONDS = 300.0
"""An engine that has not checked or loaded weights after this time counts as dead; a few seconds are usual."""


class RolloutEngines(Replicas):
    """All vLLM replicas, which serve the same versions. `current` is kept up to date with them."""

    _sender: Policy | None = None  # the learner, if it sends the policy without a file
    tools: Tools | None = None  # the environments of a task that has some

    def __init__(self, cluster: Cluster, nodes: Nodes, config: RunConfig, current: CurrentWeights, watch: Watch):
        """See Replicas."""
        super().__init__(cluster, nodes, config, current, watch)
        self._returning: list[int] = []  # restarted engines that wait for the learner's next update
        self._sharing: list[tuple[int, Reply[None]]] = []  # calls of `share_history` that may not have ended
        self._draft_length: int | None = None  # what was set last; a run begins with None

    def receive_from(self, learner: Policy) -> None:
        """Let this learner send the policy, unless policy.weight_transfer is "files"."""
        if self._config.policy.sends_without_file:
            self._sender = learner

    def come_back(self, engine: int) -> None:
        """Give a restarted engine the current policy, drafter and settings, check what it serves, and end its quarantine.

        If the learner sends the policy, all this waits for the next `update_policy`. Raises RunFailure when the engine does
        not serve the same weights as the others.
        """
        if self._sender is not None:
            self._returning.append(engine)
            return
        if (payload := self._current.policy) is not None:
            here = replace(payload, path=self._nodes.bring(payload.path, self.node_of[engine]))
            self.call(engine, RolloutEngine.update_policy, here, self._current.versions.policy)
        self._take_over(engine, self.in_dispatch[0])
        self._away.remove(engine)

    def _take_over(self, engine: int, other: int) -> None:
        """Give an engine that already serves the current policy the drafter, the history and the settings of another one."""
        specs, node, call = self._specs, self.node_of[engine], self.call
        versions, policy, drafter = self._current.versions, self._current.policy, self._current.drafter
        if drafter is not None and versions.drafter != specs[engine].versions.drafter:  # the others keep the file
            here = replace(drafter, path=self._nodes.bring(f"{specs[other].scratch}/{KEPT_DRAFTER}", node))
            call(engine, RolloutEngine.update_drafter, here, versions.drafter)
        for payload, draft in ((policy, False), (drafter, True)):
            if payload is not None and (draft or self._sender is None):  # what is sent is compared on arrival
                names = sorted(payload.digests)
                if call(engine, RolloutEngine.served_digests, names, draft) != payload.digests:
                    raise RunFailure(f"rollout_{engine} was started again and does not serve what the others do")
        if self._config.rollout.history is not None:
            self._end_sharing()
            path = f"{specs[other].scratch}/{HISTORY}"
            call(other, RolloutEngine.on_workers, EngineWorker.save_history, path)
            call(engine, RolloutEngine.on_workers, EngineWorker.load_history, self._nodes.bring(path, node))
        call(engine, RolloutEngine.set_num_speculative_tokens, self._draft_length)

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def generate(self, requests: list[RolloutRequest], **overrides: Any) -> list[Rollout]:
        """Generate one response to each request, in the order given, without tapping; all engines take requests in turn."""
        engines = self.in_dispatch[: len(requests)]
        shares = {engine: requests[i :: len(engines)] for i, engine in enumerate(engines)}
        calls = [self.begin(e, RolloutEngine.generate, s, False, **overrides) for e, s in shares.items()]
        batches = self._cluster.get([call.reference for call in calls])
        by_key = {(r.prompt_id, r.sample_index): r for batch in batches for r in batch.rollouts}
        return [by_key[request.prompt_id, request.sample_index] for request in requests]

    def play(self, prompts: list[list[RolloutRequest]], rows: list[Any], tools: Tools) -> list[RolloutBatch]:
        """Let the policy and held-out environments take turns, for each request of each prompt; engines take prompts in turn.

        As in `generate`, nothing about acceptance is learnt meanwhile.
        """
        self.call_all(RolloutEngine.in_scheduler, DraftLengths.begin, False)
        calls = [
            self.begin(engine, TrajectoryEngine.play, requests, 0.0, row, tools)
            for engine, requests, row in zip(itertools.cycle(self.in_dispatch), prompts, rows, strict=False)
        ]
        batches = self._cluster.get([call.reference for call in calls])
        self.call_all(RolloutEngine.in_scheduler, DraftLengths.begin)
        return batches

    def begin_generate(
        self, engine: int, requests: list[RolloutRequest], tap: float, together: tuple[int, int] = (0, 1),
        answer: Any = None,
    ) -> Any:  # fmt: skip
        """Begin to generate one response to each request of a prompt on one engine. Returns the reference of the RolloutBatch.

        tap, together: see RolloutEngine.generate. answer: the prompt's, which with tools is the row of its environment.
        """
        if self.tools is not None:
            return self.begin(engine, TrajectoryEngine.play, requests, tap, answer, self.tools).reference
        return self.begin(engine, RolloutEngine.generate, requests, tap, together).reference

    # -- history -----------------------------------------------------------------------------------------------------

    def share_history(self, engine: int, generated: Any) -> None:
        """Let all other engines draft from what this one has generated, if they draft from history.

        generated: the reference that `begin_generate` returned. The rollouts go from one engine to the others, and not through
        this process.
        """
        if self._config.rollout.history is not None:
            others = [other for other in self.in_dispatch if other != engine]
            self._sharing += [(other, self.begin(other, RolloutEngine.learn_from, generated)) for other in others]

    def _end_sharing(self) -> None:
        sharing, self._sharing = self._sharing, []
        for engine, reply in sharing:
            self.results({engine: reply})

    def lose(self, engine: int, failure: RunFailure) -> None:
        """See Replicas.lose. What was shared with the engine is not waited for."""
        self._sharing = [(other, reply) for other, reply in self._sharing if other != engine]
        super().lose(engine, failure)

    def save_history(self, path: Path) -> None:
        """Write the history of one engine; all have the same one, apart from the order of the rollouts."""
        self._end_sharing()
        first, save = self.in_dispatch[0], EngineWorker.save_history
        self.results({first: self.begin(first, RolloutEngine.on_workers, save, str(path))})

    def history_metrics(self) -> dict[str, float]:
        """Return what the history of one engine holds."""
        self._end_sharing()
        tokens, num_bytes = next(iter(self.call_all(RolloutEngine.on_workers, EngineWorker.history_size).values()))
        return {"history/tokens": tokens, "history/bytes": num_bytes}

    # -- weights -----------------------------------------------------------------------------------------------------

    def begin_check_policy(self, payload: WeightPayload, node: str) -> None:
        """Let engines on the node of a policy's file check it ahead of `update_policy`, unless they get the policy without a file."""
        for engine in self.in_dispatch if self._sender is None else ():
            if self.node_of[engine] == node:
                self.begin(engine, RolloutEngine.check_policy, payload)

    def update_policy(self, payload: WeightPayload, policy_version: int) -> SwapReport:
        """Serve new policy weights on all engines. Reports the time of the slowest engine."""
        returned, num_bytes = self._send_policy(self._sender) if self._sender else ([], payload.num_bytes)
        reports, refusal = self._update(RolloutEngine.update_policy, payload, policy_version)
        if refusal is not None:
            raise RunFailure(f"an engine refused policy {policy_version}: {refusal}")
        self._current.record_policy(payload, policy_version)
        for engine in returned:
            self._take_over(engine, min({*self.in_dispatch} - {*returned}))
        return SwapReport(max(report.seconds for report in reports.values()), num_bytes)

    def _send_policy(self, learner: Policy) -> tuple[list[int], int]:
        """Let the learner send its weights to the engines, which stay paused until `update_policy`.

        An engine that dies meanwhile ends the run, because the learner waits for it. Returns the restarted engines that take
        part from now on, and the size of the weights in bytes.
        """
        returning, self._returning = self._returning, []
        self._away.difference_update(returning)
        held = {engine: self.begin(engine, RolloutEngine.hold) for engine in self.in_dispatch}
        self.results(held, UPDATE_SECONDS)
        actors = [self._actors[engine] for engine in self.in_dispatch]
        num_bytes = learner.send_weights(actors, self._config.rollout.tensor_parallel_size)
        return [engine for engine in returning if engine in self.in_dispatch], num_bytes

    def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights on all engines, or on none. expected_rates: see RolloutEngine.update_drafter. All
        engines check the weights before one loads them. Raises WeightUpdateRefused; all engines then keep what they had."""
        self._current.record_attempt(drafter_version)
        if len(self.in_dispatch) > 1:
            _, refusal = self._update(RolloutEngine.check_drafter, payload)
            if refusal is not None:
                raise refusal
        reports, refusal = self._update(RolloutEngine.update_drafter, payload, drafter_version, expected_rates)
        if refusal is not None:
            self.results({engine: self.begin(engine, RolloutEngine.undo_drafter_update) for engine in reports})
            raise refusal
        self._current.record_drafter(payload, drafter_version)
        return max(reports.values(), key=lambda report: report.seconds)

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]:
        """See RolloutEngine.served_digests; of each engine."""
        return [*self.call_all(RolloutEngine.served_digests, names, draft).values()]

    def _update(
        self,
        method: Method[Concatenate[WeightPayload, P], T],
        payload: WeightPayload,
        *args: P.args,
        **options: P.kwargs,
    ) -> tuple[dict[int, T], WeightUpdateRefused | None]:
        """Bring the payload's file to each engine's node, to all at once, and call this method of all engines with it.
        Returns what `results` does. An engine whose node is gone is quarantined."""
        nodes, begun = dict.fromkeys(self.node_of[engine] for engine in self.in_dispatch), dict[int, Reply[T]]()
        coming = {node: self._nodes.begin_bring(payload.path, node) for node in nodes}
        for engine in self.in_dispatch:
            try:
                here = replace(payload, path=self._nodes.arrived(coming[self.node_of[engine]]))
            except RunFailure as failure:
                self.lose(engine, failure)
            else:
                begun[engine] = self.begin(engine, method, here, *args, **options)
        return self.results(begun, UPDATE_SECONDS)

    def set_num_speculative_tokens(self, num: int | None) -> None:
        """See RolloutEngine.set_num_speculative_tokens. An engine that is started again gets it too."""
        self._draft_length = num
        self.call_all(RolloutEngine.set_num_speculative_tokens, num)

    def clear_drafter_cache(self) -> None:
        """See RolloutEngine.clear_drafter_cache."""
        self.call_all(RolloutEngine.clear_drafter_cache)
