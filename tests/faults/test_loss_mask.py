"""Fault 11: prompt and response parted one token too early or too late, and tokens behind the end, in real rollouts."""

from dataclasses import replace
from pathlib import Path

import pytest

from cotrain.config.schema import PolicyConfig, RolloutConfig
from cotrain.policy.learner import PolicyLearner
from cotrain.process.failures import SelfCheckFailed
from cotrain.records import Rollout, RolloutBatch, ScoredRollout
from cotrain.trainer.self_check import check_log_probs, check_records
from cotrain.transport.features import read_shard, write_records
from tests.engine.conftest import LiveEngine, make_requests
from tests.faults.conftest import Fault

pytestmark = pytest.mark.engine


@pytest.fixture
def batch(fresh: LiveEngine) -> RolloutBatch:
    return fresh.generate(make_requests(8))


@pytest.mark.parametrize("shift", [-1, 1])
def test_11_the_drafters_mask(shift: int, batch: RolloutBatch, fault: Fault) -> None:
    check_records(batch, ())
    path = batch.features[0]
    write_records(path, [replace(r, prompt_length=r.prompt_length + shift) for r in read_shard(path)])
    with pytest.raises(SelfCheckFailed, match=f"a prompt of {12 + shift}, the engine was given one of 12"):
        check_records(batch, ())
    fault("11a", f"prompt length {shift:+d} in the features", "check of the first step's records", steps=1)


@pytest.mark.parametrize("shift", [-1, 1])
def test_11_the_policys_mask(
    shift: int, batch: RolloutBatch, rollout_config: RolloutConfig, target_folder: Path, fault: Fault
) -> None:
    def gap(rollouts: list[Rollout]) -> float:
        learner = PolicyLearner(PolicyConfig(model="tiny:llama"), rollout_config, str(target_folder), 1)
        scored = [ScoredRollout(r, float(i % 2), 1.0 - 2.0 * (i % 2)) for i, r in enumerate(rollouts)]
        return learner.update(scored)["policy/rollout_log_prob_gap"]

    check_log_probs(gap(batch.rollouts), "float32")
    with pytest.raises(SelfCheckFailed, match="belong to other tokens"):
        check_log_probs(gap([shifted(rollout, shift) for rollout in batch.rollouts]), "float32")
    fault("11b", f"prompt boundary {shift:+d} in the rollouts", "check of the first step's log-probs", steps=1)


def shifted(rollout: Rollout, shift: int) -> Rollout:
    """The same tokens and log-probs, with the boundary moved and as many log-probs as the response then has."""
    sequence, start = rollout.prompt_token_ids + rollout.token_ids, len(rollout.prompt_token_ids) + shift
    log_probs = rollout.log_probs[:-1] if shift > 0 else [*rollout.log_probs, rollout.log_probs[-1]]
    return replace(rollout, prompt_token_ids=sequence[:start], token_ids=sequence[start:], log_probs=log_probs)


def test_11_tokens_behind_the_end(fresh: LiveEngine, fault: Fault) -> None:
    """The engine is told to go on behind it, as a lost end-of-sequence token would make it."""
    end = 2
    sound = fresh.generate(make_requests(16), tap=False, ignore_eos=False)
    check_records(sound, [end])
    batch = fresh.generate(make_requests(16), tap=False, max_tokens=300)
    assert any(end in rollout.token_ids[:-1] for rollout in batch.rollouts)
    with pytest.raises(SelfCheckFailed, match="behind the end-of-sequence token 2"):
        check_records(batch, [end])
    fault("11c", "tokens behind the end-of-sequence token", "check of the first step's records", steps=1)
