"""What an MTP head must do on a real engine: what it reads, what is served, what it accepts.

test_mtp_head.py and test_native_mtp_head.py run these tests, each with a `target` of its own, and test_draft_model.py and
test_block_drafter.py those that are about no head.
"""

import asyncio
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.models.capability import has_gated_delta_net
from cotrain.models.loading import native_head
from cotrain.process.scratch import scratch_folder
from cotrain.trainer.buffer import batches_of
from cotrain.trainer.self_check import relative_error
from cotrain.transport.features import read_shard
from cotrain.weights.payload import WeightUpdateRefused, digest
from drafters.acceptance import rollout_acceptance
from drafters.alignment import DraftBatch
from drafters.base import Drafter, SamplingParams, TargetSpec, TargetWeights
from drafters.build import build_drafter, load_drafter
from drafters.config import DrafterModelConfig, MtpConfig
from drafters.files import read_config
from drafters.losses import acceptances
from tests.engine.conftest import LiveEngine, distilled, features_of, make_requests, moved, text_of, tokens, weights_of

MTP = MtpConfig(type="mtp")
SAMPLING = SamplingParams(1.0, 1.0, 0, "probabilistic")


@dataclass
class Target:
    """A tiny policy, a head that was never trained and one that has learnt from its text, and an engine."""

    model: AutoModelForCausalLM
    state: dict[str, torch.Tensor]
    untrained: Drafter
    trained: Drafter
    live: LiveEngine


@contextmanager
def running(
    folder: Path, rollout_config: RolloutConfig, checkpoint: Path, drafter: DrafterModelConfig = MTP
) -> Iterator[Target]:
    """An engine on the policy in this folder, with an untrained drafter; it is written to the folder `checkpoint`."""
    native = native_head(folder)
    spec = TargetSpec.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    state = load_file(folder / "model.safetensors")
    untrained = load_drafter(native, spec) if native else build_drafter(drafter, spec, seed=0)
    trained = distilled(text_of(model, untrained.serving.aux_layers), weights_of(state), folder, drafter)
    untrained.save(checkpoint, torch.float32)
    dtype = "bfloat16" if has_gated_delta_net(read_config(folder)) else "float32"
    config = rollout_config.model_copy(update={"dtype": dtype})
    with scratch_folder("test-mtp") as scratch:
        live = LiveEngine(EngineSpec(config, str(folder), str(checkpoint), untrained.serving, 0, str(scratch)))
        yield Target(model, state, untrained, trained, live)
        live.stop()


@pytest.fixture
def live(target: Target) -> LiveEngine:
    """The engine with the first policy and the trained head, whatever the test before did to it."""
    target.live.send_policy(target.state)
    target.live.send_drafter(target.trained.state_for_serving())
    target.live.run(target.live.engine.set_num_speculative_tokens(3))
    return target.live


def test_acceptance_rises_after_a_swap_and_greedy_output_stays(target: Target, live: LiveEngine) -> None:
    live.send_drafter(target.untrained.state_for_serving())
    before = live.greedy(make_requests(16))
    live.send_drafter(target.trained.state_for_serving())
    after = live.greedy(make_requests(16))
    assert after.speculation.acceptance_length > before.speculation.acceptance_length + 0.4
    assert tokens(after) == tokens(before)


@pytest.mark.long  # test_swap.py has an EAGLE-3, which is served by the same code
def test_greedy_output_is_identical_without_speculation(target: Target, live: LiveEngine) -> None:
    speculated = {}
    for num_speculative_tokens in (1, 2, 3):
        live.run(live.engine.set_num_speculative_tokens(num_speculative_tokens))
        speculated[num_speculative_tokens] = live.greedy(make_requests(16))
        assert speculated[num_speculative_tokens].speculation
    live.run(live.engine.set_num_speculative_tokens(0))
    plain = live.greedy(make_requests(16))
    assert not plain.speculation
    assert {k: tokens(batch) for k, batch in speculated.items()} == dict.fromkeys(speculated, tokens(plain))


@pytest.mark.long  # test_swap.py has an EAGLE-3, which is served by the same code
def test_a_swap_in_mid_generation_changes_no_token(target: Target, live: LiveEngine) -> None:
    reference = tokens(live.greedy(make_requests(8)))
    states = [target.untrained.state_for_serving(), target.trained.state_for_serving()]

    async def generate_and_swap() -> tuple[list[list[int]], int]:
        task = asyncio.create_task(live.engine.generate(make_requests(8), temperature=0.0, seed=None))
        swaps = 0
        while not task.done():
            await live.engine.update_drafter(live.payload(states[swaps % 2]), live.engine.versions.drafter + 1)
            swaps += 1
        return tokens(await task), swaps

    generated, swaps = live.run(generate_and_swap())
    assert swaps >= 3 and generated == reference


def test_what_is_served_is_what_was_trained(target: Target, live: LiveEngine) -> None:
    state = target.trained.state_for_serving()
    served = live.run(live.engine.served_digests(list(state), draft=True))
    of_engine = {n: tensor.to(live.dtype) if tensor.is_floating_point() else tensor for n, tensor in state.items()}
    assert served == {name: digest(tensor) for name, tensor in of_engine.items()}


def test_the_policy_that_is_served_is_the_one_that_was_sent(target: Target, live: LiveEngine) -> None:
    update = moved(target.state)
    live.send_policy(update)
    served = live.run(live.engine.served_digests(list(update), draft=False))
    assert served == {name: digest(tensor.to(live.dtype)) for name, tensor in update.items()}


def test_the_tap_takes_the_final_hidden_state_and_nothing_else(target: Target, live: LiveEngine) -> None:
    batch = live.generate(make_requests(4))
    record = read_shard(batch.features[0])[0]
    expected = features_of(target.model, record.token_ids.tolist(), record.prompt_length, 0, ())
    kept = record.feature_mask
    assert record.aux_hidden.shape == (record.num_tokens, 0) and kept.sum() == record.num_tokens - 1
    tapped, own = record.final_hidden[kept].float(), expected.final_hidden[kept]
    # Rounding to bfloat16 in every layer; the states of another layer differ by as much as they are long.
    assert relative_error(tapped, own) < (1e-4 if live.dtype == torch.float32 else 0.03)


def test_embedding_and_head_are_refused_in_an_update(target: Target, live: LiveEngine) -> None:
    reference = tokens(live.greedy(make_requests(4)))
    good = target.trained.state_for_serving()
    for name, source in (
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "model.embed_tokens.weight"),
    ):
        with pytest.raises(WeightUpdateRefused, match=f"not expected: .'{name}"):
            live.send_drafter(good | {name: target.state[source] * 2})
    assert tokens(live.greedy(make_requests(4))) == reference


def expected_rates(
    drafter: Drafter, batches: list[DraftBatch], weights: TargetWeights, num_speculative_tokens: int
) -> list[float]:
    starts = [acceptances([drafter], batch, weights, SAMPLING)[0] for batch in batches]
    return rollout_acceptance(starts, num_speculative_tokens).rates()


def test_a_policy_update_refreshes_embedding_and_head_of_the_drafter(target: Target, live: LiveEngine) -> None:
    """On a policy that moved, the served acceptance is that of its own two matrices, not that of the old ones."""
    update = moved(target.state)
    live.send_policy(update)
    shared = ["model.embed_tokens.weight", "lm_head.weight"]
    of_drafter = live.run(live.engine.served_digests(shared, draft=True))
    fresh, stale = weights_of(update), weights_of(target.state)
    matrices = [matrix.to(live.dtype) for matrix in (fresh.embedding, fresh.head)]
    assert of_drafter == {name: digest(matrix) for name, matrix in zip(shared, matrices, strict=True)}

    batch = live.generate(make_requests(128, seed=11))
    records = [record for shard in batch.features for record in read_shard(shard)]
    batches = [rows for rows, _ in batches_of(records, 4096)]
    served = batch.speculation
    rates = expected_rates(target.trained, batches, fresh, 3)
    error = 0.03
    for rate, accepted in zip(rates, served.accepted_per_position, strict=True):
        assert rate == pytest.approx(accepted / served.total(), abs=error)
    with_the_old_ones = copy.deepcopy(target.trained)
    with_the_old_ones.drafts = lambda batch, alignment, _: target.trained.drafts(batch, alignment, stale)
    assert expected_rates(with_the_old_ones, batches, fresh, 1)[0] < rates[0] - error


def test_expected_acceptance_is_served(target: Target, live: LiveEngine) -> None:
    batch = live.generate(make_requests(128, seed=12))
    records = [record for shard in batch.features for record in read_shard(shard)]
    batches = [rows for rows, _ in batches_of(records, 4096)]
    rates = expected_rates(target.trained, batches, weights_of(target.state), 3)
    assert batch.speculation.acceptance_length > 1.5
    assert 1 + sum(rates) == pytest.approx(batch.speculation.acceptance_length, rel=0.04)
