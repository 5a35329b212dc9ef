"""The expected acceptance length is the one that the engine serves: same drafter, policy, prompts and sampler.

So it is where the samples of a prompt share their prompt through the prefix cache, whose rows the engine computes once.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.config.schema import FeatureTapConfig, RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.tap_admission import row_bytes
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutBatch, RolloutRequest
from cotrain.trainer.buffer import batches_of
from cotrain.trainer.self_check import relative_error
from cotrain.transport.features import FeatureRecord, read_shard
from drafters.acceptance import StartAcceptance, rollout_acceptance
from drafters.alignment import DraftBatch, align
from drafters.base import Drafter, SamplingParams, TargetWeights
from drafters.losses import Teacher, acceptances
from tests.engine.conftest import AUX_LAYERS, SERVING, LiveEngine, distilled, eagle3, features_of, make_requests

pytestmark = pytest.mark.engine

K = 5
REQUESTS = 192
TOLERANCE = 0.03
"""Tolerance of the acceptance length. Its standard error over 192 rollouts of 48 tokens is below 0.01."""

CALLS = 4
"""Batches over which the lengths of tapped rollouts are compared with those of all."""

BLOCK, SAMPLES, PROMPT_TOKENS = 32, 8, 164
"""Small cache blocks, as on a GPU: of a prompt, five are served from the cache to the samples after the first."""


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
    update = {"prompts_per_step": REQUESTS, "num_speculative_tokens": K, "vllm": {"block_size": BLOCK}}
    config = rollout_config.model_copy(update=update)
    with scratch_folder("test-expected") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), str(drafter_folder), SERVING, 0, str(scratch)))
        live.send_drafter(deep_drafter.state_for_serving())
        yield live
        live.stop()


@pytest.fixture(scope="module")
def held_out(deep_engine: LiveEngine) -> list[DraftBatch]:
    """Features of rollouts without speculation, on prompts the drafter has not seen."""
    deep_engine.run(deep_engine.engine.set_num_speculative_tokens(0))
    batch = deep_engine.generate(make_requests(REQUESTS, seed=11))
    records = [record for shard in batch.features for record in read_shard(shard)]
    return [rows for rows, _ in batches_of(records, 4096)]


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def estimated(
    request: pytest.FixtureRequest, held_out: list[DraftBatch], deep_drafter: Drafter, target_weights: TargetWeights
) -> tuple[str, list[StartAcceptance]]:
    sampling = SamplingParams(1.0, 1.0, 0, request.param)
    parts = [acceptances([deep_drafter], batch, target_weights, sampling) for batch in held_out]
    return request.param, [part for (part,) in parts]


@pytest.mark.parametrize("num_speculative_tokens", [pytest.param(2, marks=pytest.mark.long), K])
def test_expected_acceptance_is_served(
    num_speculative_tokens: int, estimated: tuple[str, list[StartAcceptance]], deep_engine: LiveEngine
) -> None:
    method, starts = estimated
    deep_engine.run(deep_engine.engine.set_draft_sample_method(method))
    deep_engine.run(deep_engine.engine.set_num_speculative_tokens(num_speculative_tokens))
    served = deep_engine.generate(
        make_requests(REQUESTS, seed=11, first=1000 * num_speculative_tokens), tap=False
    ).speculation
    rates = rollout_acceptance(starts, num_speculative_tokens).rates()
    assert 1 + sum(rates) == pytest.approx(served.acceptance_length, rel=TOLERANCE)
    assert served.acceptance_length > 1.2, "a drafter worth estimating"
    for rate, accepted in zip(rates, served.accepted_per_position, strict=False):
        assert rate == pytest.approx(accepted / served.total(), abs=0.03)


def groups(prompts: list[RolloutRequest]) -> list[RolloutRequest]:
    return [replace(p, sample_index=i, seed=8 * n + i) for n, p in enumerate(prompts) for i in range(SAMPLES)]


@pytest.fixture(scope="module")
def grouped(deep_engine: LiveEngine) -> tuple[RolloutBatch, list[FeatureRecord]]:
    """Speculated rollouts, 8 of each long prompt. The cache holds some of these prompts, and a prefix of others."""
    deep_engine.run(deep_engine.engine.set_draft_sample_method("probabilistic"))
    deep_engine.run(deep_engine.engine.set_num_speculative_tokens(K))
    prompts = make_requests(REQUESTS // SAMPLES, length=PROMPT_TOKENS, seed=12)
    prompts[1:4] = [
        replace(p, prompt_token_ids=prompts[0].prompt_token_ids[:96] + p.prompt_token_ids[96:]) for p in prompts[1:4]
    ]
    deep_engine.generate(prompts[:8], tap=False)  # of the same policy
    batch = deep_engine.generate(groups(prompts))
    return batch, [record for shard in batch.features for record in read_shard(shard)]


def test_cached_prompts_leave_no_hole(grouped: tuple[RolloutBatch, list[FeatureRecord]], target_model: Any) -> None:
    batch, records = grouped
    masks = torch.cat([record.feature_mask[:-1] for record in records])
    print(f"{len(records)} rollouts, holes {(~masks).float().mean():.1%}")
    assert len(records) == REQUESTS
    assert masks.all() and batch.feature_stats["num_holes"] == 0
    for record in records[:: SAMPLES - 1]:  # filled rows, those of a first sample among them
        computed = features_of(target_model, record.token_ids.tolist(), record.prompt_length, 0, AUX_LAYERS)
        keep = record.feature_mask
        assert relative_error(record.aux_hidden[keep], computed.aux_hidden[keep]) < 1e-4
        assert relative_error(record.final_hidden[keep], computed.final_hidden[keep]) < 1e-4


def test_expected_acceptance_is_served_where_prompts_are_cached(
    grouped: tuple[RolloutBatch, list[FeatureRecord]], deep_drafter: Drafter, target_weights: TargetWeights
) -> None:
    batch, records = grouped
    sampling = SamplingParams(1.0, 1.0, 0, "probabilistic")
    parts = [acceptances([deep_drafter], rows, target_weights, sampling)[0] for rows, _ in batches_of(records, 4096)]
    expected = 1 + sum(rollout_acceptance(parts, K).rates())
    print(f"expected {expected:.3f}, served {batch.speculation.acceptance_length:.3f}")
    assert expected == pytest.approx(batch.speculation.acceptance_length, rel=TOLERANCE)


def test_log_probabilities_of_the_engine_give_the_targets_distribution(
    grouped: tuple[RolloutBatch, list[FeatureRecord]], deep_drafter: Drafter, target_weights: TargetWeights
) -> None:
    """Of accepted and of recovered tokens, and of those after all drafts."""
    sampling = SamplingParams(1.0, 1.0, 0, "probabilistic")
    for batch, _ in batches_of(grouped[1], 4096):
        teacher = Teacher(batch, target_weights, deep_drafter.draft_to_target[::2], sampling, is_quick=True)
        rows = align(batch, 1).target_rows(0)
        quick = teacher.from_log_probs(rows)
        assert quick is not None
        torch.testing.assert_close(
            quick, teacher.of_draft_vocabulary(*teacher.processed_logits(rows)), rtol=1e-3, atol=1e-6
        )


def test_tapped_rollouts_are_as_long_as_all(deep_engine: LiveEngine) -> None:
    """Under a bound that holds a quarter of the rollouts at full length, which are tapped does not depend on their lengths."""
    rollout = deep_engine.engine.spec.rollout
    num_tokens = REQUESTS // 4 * (12 + rollout.max_new_tokens)
    num_layers, model = len(deep_engine.engine._aux_layers) + 1, deep_engine.engine._engine.model_config
    row_size = row_bytes(num_layers * model.get_hidden_size(), model.dtype.itemsize)
    bounds = FeatureTapConfig(max_bytes=num_tokens * row_size)
    stops = list(range(40, 120, 16))  # of the tokens that the tiny target prefers
    lengths, tapped, tapped_per_call = [], [], []
    object.__setattr__(rollout, "features", bounds)
    try:
        for call in range(CALLS):
            batch = deep_engine.generate(make_requests(REQUESTS, seed=20 + call), stop_token_ids=stops)
            records = [record for shard in batch.features for record in read_shard(shard)]
            lengths += [len(r.token_ids) for r in batch.rollouts]
            tapped += [record.num_tokens - record.prompt_length for record in records]
            tapped_per_call.append(len(records))
            assert sum(record.num_tokens for record in records) <= num_tokens
    finally:
        object.__setattr__(rollout, "features", FeatureTapConfig())
    mean, spread = statistics.mean(lengths), statistics.stdev(lengths)
    print(f"mean length of all {mean:.1f}, of {tapped_per_call} tapped {statistics.mean(tapped):.1f}")
    assert spread > mean / 3, "lengths that vary"
    assert statistics.mean(tapped) == pytest.approx(mean, abs=3 * spread / len(tapped) ** 0.5)
    assert all(REQUESTS // 4 <= number < REQUESTS for number in tapped_per_call)
