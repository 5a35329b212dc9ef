"""A small draft model, cut from the policy, on a real engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.worker import EngineWorker
from cotrain.models.loading import resolve_model
from cotrain.models.tiny import VOCAB_SIZE, byte_tokenizer
from cotrain.process.scratch import scratch_folder
from cotrain.run.mlflow_store import absolute_uri
from cotrain.run.registry import list_drafters
from cotrain.weights.payload import WeightUpdateRefused, digest
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import DraftModelConfig
from tests.engine.conftest import LiveEngine, make_requests, tokens
from tests.engine.mtp_head import (
    Target,
    live,  # noqa: F401
    running,
    test_a_swap_in_mid_generation_changes_no_token,  # noqa: F401
    test_acceptance_rises_after_a_swap_and_greedy_output_stays,  # noqa: F401
    test_expected_acceptance_is_served,  # noqa: F401
    test_greedy_output_is_identical_without_speculation,  # noqa: F401
    test_the_policy_that_is_served_is_the_one_that_was_sent,  # noqa: F401
    test_the_tap_takes_the_final_hidden_state_and_nothing_else,  # noqa: F401
    test_what_is_served_is_what_was_trained,  # noqa: F401
)
from tests.engine.runs import train
from tests.engine.test_speculation_engine import K, accepted_at, draft_lengths, share_equal

pytestmark = pytest.mark.engine

DRAFT_MODEL = DraftModelConfig(type="draft_model")


@pytest.fixture(scope="module")
def target(rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    checkpoint = tmp_path_factory.mktemp("draft_model") / "v0"
    with running(resolve_model("tiny:llama"), rollout_config, checkpoint, DRAFT_MODEL) as target:
        yield target


def test_policy_and_draft_model_have_matrices_of_their_own(target: Target, live: LiveEngine) -> None:  # noqa: F811
    """A swap of one leaves the other as it is, although their tensors have the same names."""
    drafter, policy = target.trained.state_for_serving(), target.state
    live.send_drafter({name: tensor * 1.5 for name, tensor in drafter.items()})
    assert live.run(live.engine.served_digests(list(policy), draft=False)) == digests(policy)
    live.send_drafter(drafter)
    live.send_policy({name: tensor * 1.01 for name, tensor in policy.items()})
    assert live.run(live.engine.served_digests(list(drafter), draft=True)) == digests(drafter)


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in state.items()}


def test_an_incomplete_update_is_refused(target: Target, live: LiveEngine) -> None:  # noqa: F811
    before = live.greedy(make_requests(8))
    state = target.untrained.state_for_serving()
    del state["model.embed_tokens.weight"]
    with pytest.raises(WeightUpdateRefused, match=r"model\.embed_tokens\.weight"):
        live.send_drafter(state)
    after = live.greedy(make_requests(8))
    assert tokens(after) == tokens(before)
    assert after.speculation.acceptance_length == pytest.approx(before.speculation.acceptance_length, abs=0.1)


def test_greedy_drafts_are_accepted_as_often_by_a_greedy_target(target: Target, live: LiveEngine) -> None:  # noqa: F811
    drawn = live.greedy(make_requests(16))
    live.run(live.engine.set_draft_sample_method("greedy"))
    try:
        chosen = live.greedy(make_requests(16))
    finally:
        live.run(live.engine.set_draft_sample_method("probabilistic"))
    assert tokens(chosen) == tokens(drawn)
    assert chosen.speculation.total() == drawn.speculation.total()


def test_one_switched_on_in_mid_request_has_read_what_came_before(target: Target, live: LiveEngine) -> None:  # noqa: F811
    """It accepts as much, place for place, as one that was on all the time; without what it missed it does not."""
    shares, state = {}, target.trained.state_for_serving()
    # The tiny policy looks back over two tokens at most; this one gives all before them more weight.
    wide = {
        name: tensor * (0.1 if "q_proj" in name else 4 if "o_proj" in name else 1) for name, tensor in state.items()
    }
    live.send_drafter(wide)
    live.run(live.engine.clear_drafter_cache())
    draft_lengths(live, K)
    reference = accepted_at(live, 50, undrafted=1)
    draft_lengths(live, K, 0)
    for reads in (True, False):
        live.run(live.engine.clear_drafter_cache())
        live.run(live.engine.on_workers(EngineWorker.read_prompts, reads))
        shares[reads], number = share_equal(accepted_at(live, 50, undrafted=21), reference)
        assert number >= 20
    assert shares[True] > 0.95
    assert shares[False] < shares[True] - 0.1


@pytest.fixture
def tied_policy(tmp_path: Path) -> Path:
    """A random Qwen3 of two layers, whose head is its embedding."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:  # so that it does not just say the token again
            layer.self_attn.o_proj.weight.mul_(50)
            layer.mlp.down_proj.weight.mul_(50)
    model.save_pretrained(tmp_path / "policy")
    byte_tokenizer().save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def test_a_tied_draft_model_that_is_the_whole_policy_is_always_right(
    tied_policy: Path, rollout_config: RolloutConfig, tmp_path: Path
) -> None:
    """Also when it has been swapped out and in again: the head is the embedding that was sent last."""
    spec = TargetSpec.from_pretrained(tied_policy)
    whole, other = (build_drafter(DRAFT_MODEL, spec, seed=seed) for seed in (0, 1))
    whole.start_from(tied_policy)
    state = whole.state_for_serving()
    assert state.keys() == load_file(tied_policy / "model.safetensors").keys() and "lm_head.weight" not in state
    other.save(tmp_path / "v0", torch.float32)
    with scratch_folder("test-tied") as scratch:
        live = LiveEngine(
            EngineSpec(rollout_config, str(tied_policy), str(tmp_path / "v0"), whole.serving, 0, str(scratch))
        )
        lengths = []
        for sent in (state, other.state_for_serving(), state):
            live.send_drafter(sent)
            live.run(live.engine.reset_prefix_cache())
            lengths.append(live.greedy(make_requests(4)).speculation.acceptance_length)
            assert live.run(live.engine.served_digests(list(sent), draft=True)) == digests(sent)
        live.stop()
    assert lengths[0] == lengths[2] > 3.9 and lengths[1] < 2.5


@pytest.mark.long  # test_runs.py has a run
def test_a_run_cuts_trains_publishes_and_registers_it(tmp_path: Path) -> None:
    printed = train(tmp_path, "configs/smoke.toml", "drafter.model.type=draft_model")
    assert "draft_model from layers of the policy" in printed
    assert "greedy output identical with and without" in " ".join(printed.split())
    policy = load_file(resolve_model("tiny:llama") / "model.safetensors")
    versions = [load_file(tmp_path / f"smoke/drafters/v000{n}/model.safetensors") for n in (0, 2)]
    for name, tensor in versions[0].items():
        assert torch.equal(tensor, policy[name.replace("layers.1.", "layers.7.")]), name
    assert all(not torch.equal(tensor, versions[0][name]) for name, tensor in versions[1].items())
    drafters = list_drafters(absolute_uri(f"sqlite:///{tmp_path}/mlflow.db"))
    assert [row.tags["drafter_version"] for row in drafters] == ["2", "1"]
