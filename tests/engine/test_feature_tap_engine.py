"""The tap on a real engine: equal to a Hugging Face forward, with caching, chunked prefill and preemption."""

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
from cotrain.records import RolloutBatch
from cotrain.trainer.self_check import check_features, relative_error
from cotrain.transport.features import read_shard
from drafters.base import Drafter
from tests.engine.conftest import AUX_LAYERS, SERVING, LiveEngine, make_requests, tokens

pytestmark = pytest.mark.engine


class HuggingFace:
    """The policy learner's forward, for the comparison."""

    def __init__(self, model: Any):
        self.model = model

    def hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            states = self.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], -1), states[-1][0]


def assert_equal_to_forward(batch: RolloutBatch, model: Any, least_share: float, tolerance: float = 1e-4) -> None:
    records = [record for shard in batch.features for record in read_shard(shard)]
    assert len(records) == len(batch.rollouts)
    for record, rollout in zip(records, batch.rollouts, strict=True):
        assert record.token_ids.tolist() == rollout.prompt_token_ids + rollout.token_ids
        assert record.prompt_length == len(rollout.prompt_token_ids)
        assert not record.feature_mask[-1]
        assert record.feature_mask.float().mean() >= least_share
        keep = record.feature_mask
        aux, final = HuggingFace(model).hidden_states(record.token_ids.tolist(), AUX_LAYERS)
        assert relative_error(record.aux_hidden[keep], aux[keep]) < tolerance
        assert relative_error(record.final_hidden[keep], final[keep]) < tolerance
        assert not record.aux_hidden[~keep].any()


def test_features_equal_a_forward_of_the_same_tokens(
    fresh: LiveEngine, fitted_drafter: Drafter, target_model: Any
) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    batch = fresh.generate(make_requests(16, length=20))
    assert batch.speculation.acceptance_length > 1.3  # accepted and rejected drafts were both overwritten rightly
    assert batch.feature_stats["num_holes"] == 0
    assert_equal_to_forward(batch, target_model, least_share=0.98)


def test_cached_prefixes_are_computed_for_the_tap(fresh: LiveEngine, target_model: Any) -> None:
    prompts = make_requests(2, length=280, seed=11)
    fresh.generate(prompts, tap=False)
    again = fresh.generate(prompts)  # all but a few tokens of each prompt are in the cache
    assert again.feature_stats["num_holes"] == 0
    assert_equal_to_forward(again, target_model, least_share=0.99)


def test_the_samples_of_a_short_prompt_share_it(fresh: LiveEngine, target_model: Any) -> None:
    """The first computes it, and the others take its one whole block of 53 tokens from the prefix cache."""
    [request] = make_requests(1, length=53, seed=21)
    before = fresh.counted("counter_prefix_cache_hits")
    batch = fresh.generate([replace(request, sample_index=i, seed=i) for i in range(4)])
    assert fresh.counted("counter_prefix_cache_hits") - before == 3 * 32
    assert batch.feature_stats["num_holes"] == 0
    assert_equal_to_forward(batch, target_model, least_share=0.98)


def test_tapping_with_speculation_off_and_not_at_all(fresh: LiveEngine, target_model: Any) -> None:
    fresh.run(fresh.engine.set_num_speculative_tokens(0))
    assert_equal_to_forward(fresh.generate(make_requests(4)), target_model, least_share=0.98)
    assert fresh.generate(make_requests(4), tap=False).features == []


def test_tapping_changes_no_token(fresh: LiveEngine) -> None:
    requests = make_requests(8)
    assert tokens(fresh.greedy(requests)) == tokens(fresh.greedy(requests, tap=False))


def test_the_self_check_finds_a_layer_off_by_one(fresh: LiveEngine, target_model: Any) -> None:
    batch = fresh.generate(make_requests(4))
    assert check_features(batch, HuggingFace(target_model).hidden_states, "float32") < 1e-4

    class OffByOne(HuggingFace):
        def hidden_states(self, token_ids, layers):
            return super().hidden_states(token_ids, tuple(layer + 1 for layer in layers))

    for dtype in ("float32", "bfloat16"):
        with pytest.raises(RuntimeError, match=r"configured \[2, 4, 5\], they look like layers \[1, 3, 4\]"):
            check_features(batch, OffByOne(target_model).hidden_states, dtype)


@pytest.fixture(scope="module")
def cramped(rollout_config: RolloutConfig, target_folder: Path, drafter_folder: Path) -> Iterator[LiveEngine]:
    """An engine that has to split prefills and preempt: little KV cache, few tokens a step, a tap with a limit."""
    config = rollout_config.model_copy(
        update={
            "vllm": {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 20, "block_size": 32},
            "features": FeatureTapConfig(max_bytes=600 * row_bytes(4 * 128, 4)),
        }
    )
    with scratch_folder("test-cramped") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), str(drafter_folder), SERVING, 0, str(scratch)))
        yield live
        live.stop()


def test_chunked_prefill_and_preemption(cramped: LiveEngine, target_model: Any) -> None:
    batch = cramped.greedy(make_requests(5, length=100))  # 5 x 148 tokens in 20 blocks of 32
    assert len(batch.features) == 1
    wanted = {tuple(r.prompt_token_ids + r.token_ids): r for r in batch.rollouts}
    records = read_shard(batch.features[0])
    tapped = [wanted[tuple(record.token_ids.tolist())] for record in records]
    assert len(tapped) == 4  # what a limit of 600 tokens holds
    assert_equal_to_forward(replace(batch, rollouts=tapped), target_model, least_share=0.99)
    assert cramped.counted("counter_num_preempted_reqs") > 0


def test_the_tap_keeps_to_its_limit(cramped: LiveEngine) -> None:
    requests = make_requests(12, length=100, seed=4)
    batches = [cramped.greedy(requests) for _ in range(2)]
    chosen = []
    for batch in batches:
        records = read_shard(batch.features[0])
        assert len(batch.rollouts) == 12
        assert len(records) == 4 and batch.feature_stats["num_tokens"] == 4 * 148 <= 600
        assert batch.feature_stats["num_holes"] == 0
        chosen.append({tuple(record.token_ids.tolist()) for record in records})
    assert chosen[0] != chosen[1]
