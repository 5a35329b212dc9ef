"""Faults 5, 9 and 10 on a real engine: the policy moves and the drafter does not, or it moves under a rollout."""

import asyncio

import pytest

from cotrain.config.alarm import AlarmConfig
from cotrain.config.gate import GateConfig
from cotrain.publish.alarms import StepRecord, check_step
from cotrain.publish.drift import TrainTrigger
from cotrain.publish.expected import served_length
from cotrain.publish.gate import pace_of
from cotrain.records import Rollout, RolloutBatch, Versions
from drafters.base import Drafter
from tests.engine.conftest import LiveEngine, make_requests
from tests.faults.conftest import Fault

pytestmark = pytest.mark.engine

WARM_UP_STEPS, LAG_LIMIT = 4, 2


def test_5_the_drafter_is_forgotten(
    fresh: LiveEngine, fitted_drafter: Drafter, moved_target_state: dict, fault: Fault
) -> None:
    """Seen twice: the acceptance that the engine serves falls (trigger), and versions pass by (alarm)."""
    fresh.send_drafter(fitted_drafter.state_for_serving())
    trained_on = fresh.engine.versions.policy
    config = GateConfig(train_when="drift")
    trigger = TrainTrigger(config, train_every=1)
    for _ in range(config.patience):
        trigger.record_session(gain=0.0, seconds=1e9)  # training never pays: drift alone decides

    def step(seed: int) -> bool:
        batch = fresh.generate(make_requests(16, seed=seed))
        trigger.observe(None, None, served_length(batch.rollouts))
        return trigger.decide(seed, pace_of(batch)).train

    assert not any(step(seed) for seed in range(WARM_UP_STEPS))
    fresh.send_policy(moved_target_state)
    steps = next((n for n in range(1, 5) if step(WARM_UP_STEPS + n)), None)
    assert steps is not None
    fault("5a", "target updated, drafter not: acceptance falls", "drift trigger trains", steps=steps)

    def alarms() -> list[str]:
        batch = fresh.generate(make_requests(4))
        lag = fresh.engine.versions.policy - trained_on
        record = StepRecord(batch.rollouts, fresh.engine.versions, 3, None, lag_versions=lag)
        return [alarm.name for alarm in check_step(record, AlarmConfig(), LAG_LIMIT, steps=100)]

    for _ in range(LAG_LIMIT - 1):
        assert alarms() == []
        fresh.send_policy(moved_target_state)
    assert alarms() == []
    fresh.send_policy(moved_target_state)
    assert alarms() == ["drafter_lags"]
    fault("5b", "target updated again and again, drafter not", "drafter_lags", steps=LAG_LIMIT + 1)
    fault("9c", "trainer delivers nothing while the policy goes on", "drafter_lags", steps=LAG_LIMIT + 1)


def test_10_the_policy_moves_under_a_rollout(fresh: LiveEngine, moved_target_state: dict, fault: Fault) -> None:
    before = fresh.engine.versions

    async def generate_and_move() -> RolloutBatch:
        payload = fresh.payload(moved_target_state)
        task = asyncio.create_task(fresh.engine.generate(make_requests(8), max_tokens=300))
        await asyncio.sleep(0.3)
        await fresh.engine.update_policy(payload, before.policy + 1)
        assert not task.done()
        return await task

    batch = fresh.run(generate_and_move())
    assert {rollout.versions for rollout in batch.rollouts} == {before}  # what they began with

    def alarms(rollouts: list[Rollout], believed: Versions) -> list[tuple[str, bool]]:
        record = StepRecord(rollouts, believed, 3, None)
        return [(alarm.name, alarm.fatal) for alarm in check_step(record, AlarmConfig(), LAG_LIMIT, steps=100)]

    assert alarms(batch.rollouts, fresh.engine.versions) == [("wrong_version", True)]
    fault("10a", "policy updated in mid-generation, by the loop", "wrong_version", steps=1)
    later = fresh.generate(make_requests(4))
    assert alarms(later.rollouts, before) == [("wrong_version", True)]
    fault("10b", "policy updated in mid-generation, and the loop does not know", "wrong_version", steps=2)
