"""Speculation with vLLM's asynchronous scheduling, which vLLM uses on GPUs: the tests of weights that change in mid-generation.

Each update of the policy preempts all requests while a step is in flight.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutBatch
from drafters.base import Drafter
from tests.engine.async_on_cpu import scheduling_is_asynchronous
from tests.engine.conftest import SERVING, LiveEngine, make_requests, tokens
from tests.engine.test_stream_engine import (  # noqa: F401
    models,
    swapped,
    test_calls_overlap_and_each_gets_its_own,
    test_every_token_is_stamped_with_the_policy_that_generated_it,
    test_hidden_states_are_those_of_the_last_policy,
    test_verification_steps_add_up_to_the_tokens_by_which_last_segments_are_counted,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(rollout_config: RolloutConfig, target_folder: Path, drafter_folder: Path) -> Iterator[LiveEngine]:
    with scratch_folder("async") as scratch, scheduling_is_asynchronous():
        live = LiveEngine(EngineSpec(rollout_config, str(target_folder), str(drafter_folder), SERVING, 0, str(scratch)))
        yield live
        live.stop()


def test_greedy_text_is_the_same_at_every_draft_length_and_while_it_changes(
    fresh: LiveEngine, fitted_drafter: Drafter
) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    requests, texts = make_requests(12), []
    assert fresh.engine._engine.vllm_config.scheduler_config.async_scheduling
    for length in (0, 3, 1):
        fresh.run(fresh.engine.set_num_speculative_tokens(length))
        texts.append(tokens(fresh.greedy(requests)))
    fresh.run(fresh.engine.set_num_speculative_tokens(None))
    texts.append(tokens(fresh.greedy(requests)))
    assert all(text == texts[0] for text in texts)


def test_greedy_text_is_the_same_while_drafting_is_switched_off_and_on(
    fresh: LiveEngine, fitted_drafter: Drafter
) -> None:
    """A step that verifies drafts and proposes none tells the next step how many tokens were accepted."""
    fresh.send_drafter(fitted_drafter.state_for_serving())
    requests, engine = make_requests(8), fresh.engine
    expected = tokens(fresh.greedy(requests, max_tokens=200))

    async def switched() -> RolloutBatch:
        task = asyncio.create_task(engine.generate(requests, temperature=0.0, seed=None, max_tokens=200))
        while not task.done():
            for length in (0, 3):
                await engine.set_num_speculative_tokens(length)
                await asyncio.sleep(0.02)
        return await task

    batch = fresh.run(switched())
    assert tokens(batch) == expected
    assert 0 < batch.speculation.total() < sum(len(text) for text in expected)


def test_tokens_that_vllm_drops_are_not_counted_as_generated(fresh: LiveEngine, fitted_drafter: Drafter) -> None:
    """How many drafts are accepted decides when a response ends, and the next step runs for its request already."""
    fresh.send_drafter(fitted_drafter.state_for_serving())
    fresh.run(fresh.engine.set_num_speculative_tokens(3))
    fresh.run(fresh.engine.take_window())
    batch = fresh.run(fresh.engine.generate(make_requests(6)))
    counted = sum(step.num_tokens for step in fresh.run(fresh.engine.take_window()).steps)
    assert counted == sum(1 + sum(1 + accepted for _, accepted in r.verification_steps) for r in batch.rollouts)
