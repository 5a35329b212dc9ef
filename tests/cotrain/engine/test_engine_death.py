"""Waiting for an engine that dies; tests/faults kills a real one."""

import asyncio
from types import SimpleNamespace

import pytest

from cotrain.engine.processes import death_in_words
from cotrain.process.failures import RunFailure


def engine():
    return SimpleNamespace(errored=False)


async def wait_for(answer, live):
    async with death_in_words(live, poll_seconds=0.01):
        return await answer


def test_an_answer_that_never_comes_ends_with_the_engine():
    async def run():
        live, answer = engine(), asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(wait_for(answer, live))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "as long as the engine lives"
        live.errored = True
        with pytest.raises(RunFailure, match="engine process has died"):
            await asyncio.wait_for(waiting, 5)
        await asyncio.sleep(0)

    asyncio.run(run())


def test_a_wait_within_a_wait_ends_alike():
    async def nested(live):
        async with death_in_words(live, poll_seconds=0.01):
            await wait_for(asyncio.sleep(60), live)

    async def run():
        live = engine()
        waiting = asyncio.create_task(nested(live))
        await asyncio.sleep(0.03)
        live.errored = True
        with pytest.raises(RunFailure, match="engine process has died"):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


def test_who_has_waited_can_wait_again():
    async def run():
        live = engine()
        live.errored = True
        with pytest.raises(RunFailure):
            await wait_for(asyncio.sleep(60), live)
        await asyncio.sleep(0.05)  # would raise if the task were still being cancelled
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(run())


def test_vllms_own_error_comes_in_words():
    from vllm.v1.engine.exceptions import EngineDeadError

    async def fail():
        raise EngineDeadError

    with pytest.raises(RunFailure, match="engine process has died") as caught:
        asyncio.run(wait_for(fail(), engine()))
    assert isinstance(caught.value.__cause__, EngineDeadError)


def test_answers_and_other_errors_pass():
    async def answer():
        return 7

    async def fail():
        raise KeyError("of the body")

    assert asyncio.run(wait_for(answer(), engine())) == 7
    with pytest.raises(KeyError, match="of the body"):
        asyncio.run(wait_for(fail(), engine()))


def test_being_cancelled_by_somebody_else_is_not_a_death():
    async def run():
        waiting = asyncio.create_task(wait_for(asyncio.sleep(60), engine()))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
