"""vLLM's asynchronous engine: its start and end, pauses, and the calls into its scheduler and workers.

The environment of the process comes from `threads.engine_environment` and must be set before vLLM is imported, which is why
vLLM is imported in `start`.
"""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from cotrain.config.lossless_guard import MODEL_RUNNER, environment_problems, model_runner_problems
from cotrain.engine.arguments import EngineSpec, engine_arguments, scheduler_for
from cotrain.engine.speculation.draft_length import DraftLengths
from cotrain.engine.worker import EngineWorker
from cotrain.process.children import environment
from cotrain.process.failures import RunFailure

T = TypeVar("T")
P = ParamSpec("P")

PARTIAL = ".partial"
"""Ending of a shard's name until the worker has answered. If the engine dies before, nobody else knows of the shard."""

POLL_SECONDS = 1.0
MESSAGE = "vLLM's engine process has died: killed from outside, or out of memory"


class EngineProcesses:
    """The processes of one vLLM engine."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self._engine: Any = None
        self._pausing = asyncio.Lock()  # vLLM does not count pauses: a second pause would end with the first resume

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
        await self.on_workers(EngineWorker.start, self.spec.scratch, has_drafter, index)

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
