"""The weights that one engine serves: updates of the policy and of the drafter, and the versions that tokens are stamped with."""

import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from cotrain.engine.arguments import EngineSpec
from cotrain.engine.processes import EngineProcesses, death_in_words
from cotrain.engine.speculation.draft_length import DraftLengths
from cotrain.engine.worker import EngineWorker
from cotrain.process.failures import RunFailure
from cotrain.records import SwapReport, Versions, WeightPayload
from cotrain.weights.payload import WEIGHTS_UNKNOWN, WeightUpdateRefused


class UpdatableEngine(EngineProcesses):
    """An engine whose weights change while requests run. Every token carries the versions that generated it."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.versions = spec.versions
        self._before = spec.versions  # the versions before the last update of the drafter
        self._held: tuple[float, AsyncExitStack] | None = None  # since when, and what ends the pause

    async def start(self) -> None:
        """See EngineProcesses.start."""
        await super().start()
        await self._stamp(self.versions)

    async def hold(self) -> None:
        """Make no step until the next `update_policy`. The learner sends the weights meanwhile."""
        since, pause = time.perf_counter(), AsyncExitStack()
        async with death_in_words(self._engine):
            await pause.enter_async_context(self._paused(True))
        self._held = since, pause

    async def check_policy(self, payload: WeightPayload) -> None:
        """Check the weights of the next `update_policy` ahead of it. What it would refuse, it will refuse then."""
        with suppress(RunFailure, RuntimeError):
            await self.on_workers(EngineWorker.check, False, payload.path, payload.digests)

    async def update_policy(self, payload: WeightPayload, policy_version: int) -> SwapReport:
        """Serve new policy weights. Requests in flight are preempted and computed again with the new weights.

        After `hold`, what is served is only compared with the payload, because the learner has sent it. Raises
        WeightUpdateRefused with the worker's reason, and the old weights stay. Raises RunFailure when it is not known which weights
        are served.
        """
        if policy_version < self.versions.policy:
            raise ValueError(f"policy version {policy_version} is older than the served {self.versions.policy}")
        serve = EngineWorker.update if self._held is None else EngineWorker.compare
        if self._held is None:
            await self.hold()
        assert self._held is not None
        (since, pause), self._held = self._held, None
        async with death_in_words(self._engine), pause:
            await self._weights(self.on_workers(serve, False, payload.path, payload.digests, policy_version))
            # Still paused, so that the first token after the pause carries the new version.
            await self._stamp(Versions(policy_version, self.versions.drafter))
        return SwapReport(time.perf_counter() - since, payload.num_bytes)

    async def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights, mid-generation if need be. Caches stay, because they never decide a token.

        expected_rates: by draft position, as far as known, the share of verification steps that are expected to accept it and all
        before it; draft lengths are chosen by them at first. Raises WeightUpdateRefused and RunFailure like `update_policy`.
        """
        if drafter_version < self.versions.drafter:
            raise ValueError(f"drafter version {drafter_version} is older than the served {self.versions.drafter}")
        started = time.perf_counter()
        await self._weights(self.on_workers(EngineWorker.update, True, payload.path, payload.digests, drafter_version))
        self._before = self.versions
        await self._stamp(Versions(self.versions.policy, drafter_version))
        await self.in_scheduler(DraftLengths.new_drafter, list(expected_rates or ()))
        return SwapReport(time.perf_counter() - started, payload.num_bytes)

    async def check_drafter(self, payload: WeightPayload) -> None:
        """Raise WeightUpdateRefused if `update_drafter` would refuse these weights. What is served does not change."""
        await self._weights(self.on_workers(EngineWorker.check, True, payload.path, payload.digests))

    async def undo_drafter_update(self) -> None:
        """Return to the drafter weights and version from before the last `update_drafter`. Call it once at most per update."""
        await self._weights(self.on_workers(EngineWorker.undo_drafter_update))
        await self._stamp(Versions(self.versions.policy, self._before.drafter))
        await self.in_scheduler(DraftLengths.new_drafter, None)

    async def _stamp(self, versions: Versions) -> None:
        """Stamp tokens, and rows of the tap, with these versions from now on."""
        await self.on_workers(EngineWorker.set_policy_version, versions.policy)
        async with death_in_words(self._engine):
            await self._engine.update_weight_version(str(versions))
        self.versions = versions

    async def _weights(self, call: Coroutine[Any, Any, None]) -> None:
        """Wait for a call of the workers that checks or changes weights."""
        try:
            await call
        except RunFailure:
            raise
        except Exception as error:  # only the text of a worker's exception arrives here
            if WEIGHTS_UNKNOWN in str(error):
                raise RunFailure(f"a weight update failed, and {error}") from error
            raise WeightUpdateRefused(str(error)) from error

    async def served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Return checksums of the named tensors, read back whole; empty for a tensor that is not served as it was sent."""
        return await self.on_workers(EngineWorker.served_digests, names, draft)
