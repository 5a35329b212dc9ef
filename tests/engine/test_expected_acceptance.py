"""The expected acceptance length is the one that the engine serves: same drafter, policy, prompts and sampler."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cotrain.config import RolloutConfig
from cotrain.drafting.buffer import batches_of
from cotrain.drafting.features import read_shard
from cotrain.rollout.engine import EngineSpec
from cotrain.scratch import scratch_folder
from drafters.acceptance import StartAcceptance, acceptance_rates
from drafters.base import DraftBatch, Drafter, Sampler, TargetWeights
from drafters.config import ObjectiveConfig
from tests.engine.conftest import SERVING, LiveEngine, distilled, eagle3, make_requests

pytestmark = pytest.mark.engine

K = 5
REQUESTS = 192
TOLERANCE = 0.03
"""Of the acceptance length. Its standard error over 192 rollouts of 48 tokens is below 0.01."""


@pytest.fixture(scope="module")
def deep_drafter(sampled_text: DraftBatch, target_weights: TargetWeights, target_folder: Path) -> Drafter:
    return distilled(sampled_text, target_weights, target_folder, eagle3(trained_depth=K))


@pytest.fixture(scope="module")
def deep_engine(
    rollout_config: RolloutConfig,
    target_folder: Path,
    drafter_folder: Path,
    deep_drafter: Drafter,
) -> Iterator[LiveEngine]:
    config = rollout_config.model_copy(update={"prompts_per_step": REQUESTS, "draft_tokens": K})
    with scratch_folder("test-expected") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), str(drafter_folder), SERVING, 0, str(scratch)))
        live.send_drafter(deep_drafter.state_for_serving())
        yield live
        live.stop()


@pytest.fixture(scope="module")
def held_out(deep_engine: LiveEngine) -> list[DraftBatch]:
    """Features of rollouts without speculation, on prompts the drafter has not seen."""
    deep_engine.run(deep_engine.engine.set_draft_tokens(0))
    batch = deep_engine.generate(make_requests(REQUESTS, seed=11))
    return batches_of([record for shard in batch.features for record in read_shard(shard.path)], 4096)


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def estimated(
    request: pytest.FixtureRequest, held_out: list[DraftBatch], deep_drafter: Drafter, target_weights: TargetWeights
) -> tuple[str, list[StartAcceptance]]:
    sampler = Sampler(1.0, 1.0, 0, request.param)
    with torch.no_grad():
        results = [deep_drafter.loss(batch, target_weights, sampler, ObjectiveConfig()) for batch in held_out]
    return request.param, [result.acceptance for result in results]


@pytest.mark.parametrize("draft_tokens", range(1, K + 1))
def test_expected_acceptance_is_served(
    draft_tokens: int, estimated: tuple[str, list[StartAcceptance]], deep_engine: LiveEngine
) -> None:
    method, starts = estimated
    deep_engine.run(deep_engine.engine.set_draft_sample_method(method))
    deep_engine.run(deep_engine.engine.set_draft_tokens(draft_tokens))
    served = deep_engine.generate(make_requests(REQUESTS, seed=11, first=1000 * draft_tokens), tap=False).speculation
    assert served is not None
    rates = acceptance_rates(starts, draft_tokens)
    assert 1 + sum(rates) == pytest.approx(served.acceptance_length, rel=TOLERANCE)
    assert served.acceptance_length > 1.2, "a drafter worth estimating"
    for rate, accepted in zip(rates, served.accepted_per_position, strict=False):
        assert rate == pytest.approx(accepted / served.num_drafts, abs=0.03)
