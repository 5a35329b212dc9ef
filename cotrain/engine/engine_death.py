"""Waits for vLLM's engine process, and raises an error in plain words when that process has died.

When its engine has died, vLLM raises an error in requests, but not in its other calls, such as a weight update: the answer
to such a call never comes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from cotrain.process.failures import RunFailure

POLL_SECONDS = 1.0
MESSAGE = "vLLM's engine process has died: killed from outside, or out of memory"


@contextlib.asynccontextmanager
async def death_in_words(engine: Any, poll_seconds: float = POLL_SECONDS) -> AsyncIterator[None]:
    """Raise RunFailure when the engine process dies while the body waits for it.

    engine: vLLM's AsyncLLM. The body is cancelled within two polls of the death.
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
