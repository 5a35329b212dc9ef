"""A small draft model, cut from the policy, on a real engine."""

from collections.abc import Iterator

import pytest
import torch

from cotrain.config.schema import RolloutConfig
from cotrain.models.loading import resolve_model
from cotrain.transport.payload import WeightUpdateRefused, digest
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
from tests.engine.test_speculation_engine import K, accepted_at, draft_lengths, share_equal

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target(rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    config = DraftModelConfig(type="draft_model")
    checkpoint = tmp_path_factory.mktemp("draft_model") / "v0"
    with running(resolve_model("tiny:llama"), rollout_config, checkpoint, config) as target:
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
    assert chosen.speculation.num_drafts == drawn.speculation.num_drafts


def test_one_switched_on_in_mid_request_has_read_what_came_before(target: Target, live: LiveEngine) -> None:  # noqa: F811
    """It accepts as much, place for place, as one that was on all the time; without what it missed it does not."""
    shares, state = {}, target.trained.state_for_serving()
    # The tiny policy looks back over two tokens at most; this one gives all before them more weight.
    wide = {
        name: tensor * (0.3 if "q_proj" in name else 2 if "o_proj" in name else 1) for name, tensor in state.items()
    }
    live.send_drafter(wide)
    live.run(live.engine.clear_drafter_cache())
    draft_lengths(live, K)
    reference = accepted_at(live, 50, undrafted=1)
    draft_lengths(live, K, 0)
    for reads in (True, False):
        live.run(live.engine.clear_drafter_cache())
        live.run(live.engine._engine.collective_rpc("cotrain_read_prompts", args=(reads,)))
        shares[reads], number = share_equal(accepted_at(live, 50, undrafted=21), reference)
        assert number >= 20
    assert shares[True] > 0.95
    assert shares[False] < shares[True] - 0.1
