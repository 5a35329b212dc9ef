"""vLLM's asynchronous engine: its start and end, pauses, updates of its weights, and the calls into its scheduler and workers.

The environment of the process comes from `threads.engine_environment` and must be set before vLLM is imported, which is why
vLLM is imported in `start`.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from cotrain.config.lossless_guard import MODEL_RUNNER, environment_problems, model_runner_problems
from cotrain.engine.arguments import EngineSpec, engine_arguments, scheduler_for
from cotrain.engine.speculation.draft_length import DraftLengths
from cotrain.engine.worker import EngineWorker
from cotrain.process.children import environment
from cotrain.process.failures import RunFailure
from cotrain.records import SwapReport, Versions, WeightPayload
from cotrain.weights.payload import WEIGHTS_UNKNOWN, WeightUpdateRefused

T = TypeVar("T")
P = ParamSpec("P")

PARTIAL = ".partial"
"""Ending of a shard's name until the worker has answered. If the engine dies before, nobody else knows of the shard."""

POLL_SECONDS = 1.0
MESSAGE = "vLLM's engine process has died: killed from outside, or out of memory"


class VllmEngine:
    """The processes of one vLLM engine, whose weights change while requests run. Every token carries the versions that generated it."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self._engine: Any = None
        self._pausing = asyncio.Lock()  # vLLM does not count pauses: a second pause would end with the first resume
        self.versions = spec.versions
        self._before = spec.versions  # the versions before the last update of the drafter
        self._held: tuple[float, AsyncExitStack] | None = None  # since when, and what ends the pause

    async def start(self) -> None:
        """Load the model. Until `set_num_speculative_tokens`, every step drafts rollout.num_speculative_tokens.

        Raises ValueError that names an environment variable which may change what is generated with speculation.
        """
        Path(self.spec.scratch).mkdir(parents=True, exist_ok=True)
        for left_by_a_dead_engine in Path(self.spec.scratch).glob(f"*{PARTIAL}"):
            left_by_a_dead_engine.unlink()
        if self.spec.speculates:
            _check_environment()

        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        with environment(model_runner(self.spec)):
            config = AsyncEngineArgs(**engine_arguments(self.spec)).create_engine_config(UsageContext.ENGINE_CONTEXT)
            scheduling = config.scheduler_config
            scheduling.scheduler_cls = scheduler_for(bool(scheduling.async_scheduling))
            self._engine = AsyncLLM.from_vllm_config(config)
        history, has_drafter = self.spec.rollout.history, self.spec.drafter_folder is not None
        draws = self.spec.rollout.draft_sample_method == "probabilistic"
        index = None if history is None else (history.max_bytes, draws)
        await self.on_workers(EngineWorker.start, self.spec.scratch, has_drafter, index, self.spec.adapters)
        await self._stamp(self.versions)

    async def shutdown(self) -> None:
        """Stop vLLM and all its processes."""
        if self._engine is not None:
            # By default vLLM kills its engine core after 5 s, and the core has always used all of them.
            self._engine.shutdown(timeout=1.0)
            self._engine = None

    @asynccontextmanager
    async def _paused(self, clear_cache: bool) -> AsyncIterator[None]:
        """Keep the engine from making steps in the body. Requests in flight stay; clear_cache: they are computed again."""
        async with self._pausing:
            await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
            try:
                yield
            finally:
                await self._engine.resume_generation()

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        async with death_in_words(self._engine):
            await self._engine.reset_prefix_cache()

    async def clear_drafter_cache(self) -> None:
        """Forget cached prefixes and the drafter's keys and values, after a drafter that may have computed NaN.

        Requests in flight are preempted and computed again.
        """
        async with death_in_words(self._engine), self._paused(True):
            await self.on_workers(EngineWorker.clear_drafter_cache)

    # -- the weights that are served ----------------------------------------------------------------------------------

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

    # -- calls into vLLM's processes, the only places where a method becomes a name -----------------------------------

    async def on_workers(
        self, method: Callable[Concatenate[EngineWorker, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call a method of EngineWorker on all ranks. Returns the result of rank 0; raises RuntimeError if one failed."""
        async with death_in_words(self._engine):
            answers = await self._engine.collective_rpc("cotrain_call", args=(method.__name__, args, options))
        if errors := dict.fromkeys(error for _, error in answers if error is not None):
            raise RuntimeError("; ".join(errors))
        return answers[0][0]

    async def in_scheduler(
        self, method: Callable[Concatenate[DraftLengths, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call a method of the scheduler's DraftLengths. vLLM can send only plain lists, dictionaries and numbers back."""
        async with death_in_words(self._engine):
            call = "cotrain_draft_lengths", method.__name__, list(args), options
            return await self._engine.engine_core.call_utility_async(*call)


def model_runner(spec: EngineSpec) -> dict[str, str]:
    """Return what the environment lacks for vLLM to take a model runner that suits. Raises ValueError naming the variable."""
    from vllm.platforms import current_platform

    on_cpu, has_history = current_platform.is_cpu(), spec.rollout.history is not None
    drafter = None if spec.serving is None else spec.serving.method
    for name, reason in model_runner_problems(os.environ, on_cpu, has_history, drafter):
        raise ValueError(f"{name}: {reason}")
    if drafter == "dspark" and on_cpu and MODEL_RUNNER not in os.environ:
        raise ValueError("dspark: only vLLM's model runner V2 drafts with it, for which the CPU build has no Triton")
    return {MODEL_RUNNER: "0"} if (on_cpu or has_history) and MODEL_RUNNER not in os.environ else {}


def import_vllm() -> None:
    """Import vLLM, which takes seconds, and on a CPU let its engine cores be forked."""
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from cotrain.engine.cpu import fork_engine_core

        fork_engine_core()


@functools.cache
def _check_environment() -> None:
    """Raise ValueError naming the first variable that is not allowed. Runs once a process, before vLLM sets its own."""
    for name, reason in environment_problems(os.environ):
        raise ValueError(f"environment variable {name}: {reason}")


@asynccontextmanager
async def death_in_words(engine: Any, poll_seconds: float = POLL_SECONDS) -> AsyncIterator[None]:
    """Raise RunFailure when the engine process dies while the body waits for it.

    vLLM then raises an error in requests, but the answer to its other calls, such as a weight update, never comes. engine: vLLM's
    AsyncLLM. The body is cancelled within two polls of the death.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(engine, poll_seconds))
            yield
            watching.cancel()
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        if isinstance(error, EngineDeadError):
            raise RunFailure(MESSAGE) from error
        raise error from error.__cause__


async def _watch(engine: Any, poll_seconds: float) -> None:
    while not engine.errored:
        await asyncio.sleep(poll_seconds)
    await asyncio.sleep(poll_seconds)  # most waits end by themselves, with vLLM's own error
    raise RunFailure(MESSAGE)
