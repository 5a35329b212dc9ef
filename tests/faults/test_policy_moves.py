"""Faults 5, 9 and 10 on a real engine: the policy moves and the drafter does not, or it moves under a rollout."""

import asyncio
from dataclasses import replace

import pytest

from cotrain.config.schema import DrafterConfig
from cotrain.loop.ledger import check_lag
from cotrain.process.failures import RunFailure
from cotrain.publish.alarms import LAG_ROUNDS, Alarm, check_step
from cotrain.records import RolloutBatch, Versions
from drafters.base import Drafter
from tests.engine.conftest import LiveEngine, make_requests
from tests.faults.conftest import Fault
from tests.publish_evidence import evidence_of

pytestmark = pytest.mark.engine


def alarms_of(batch: RolloutBatch, believed: Versions, unjudged: int = 0) -> list[Alarm]:
    evidence = evidence_of(batch, believed)
    evidence = replace(evidence, serving=replace(evidence.serving, unjudged=unjudged))
    return check_step(evidence, DrafterConfig(model={"type": "eagle3"}), total_steps=100)


def test_5_the_drafter_is_forgotten(
    fresh: LiveEngine, fitted_drafter: Drafter, moved_target_state: dict, fault: Fault
) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    trained_on = fresh.engine.versions.policy

    def alarms() -> list[str]:
        batch = fresh.generate(make_requests(4))
        return [
            alarm.name for alarm in alarms_of(batch, fresh.engine.versions, fresh.engine.versions.policy - trained_on)
        ]

    for _ in range(LAG_ROUNDS):
        fresh.send_policy(moved_target_state)
        assert alarms() == []
    fresh.send_policy(moved_target_state)
    assert alarms() == ["drafter_lags"]
    fault("5", "target updated again and again, drafter not", "drafter_lags", steps=LAG_ROUNDS + 1)
    fault("9c", "trainer delivers nothing while the policy goes on", "drafter_lags", steps=LAG_ROUNDS + 1)


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
    served = fresh.engine.versions
    assert {tuple(segment.versions for segment in r.segments) for r in batch.rollouts} == {(before, served)}
    check_lag(batch.rollouts, served, max_policy_lag=1)
    with pytest.raises(RunFailure, match="lag_exceeded"):
        check_lag(batch.rollouts, served, max_policy_lag=0)
    fault("10a", "policy updated in mid-generation of a run without lag", "lag_exceeded", steps=1)
    later = fresh.generate(make_requests(4))
    with pytest.raises(RunFailure, match="unknown_version"):
        check_lag(later.rollouts, before, max_policy_lag=1)
    assert [(alarm.name, alarm.fatal) for alarm in alarms_of(later, before)] == [("wrong_version", True)]
    fault("10b", "policy updated, and the loop does not know", "unknown_version", steps=2)
