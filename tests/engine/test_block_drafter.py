"""A block drafter of two layers on a real engine."""

from collections.abc import Iterator

import pytest
import torch

from cotrain.config.schema import RolloutConfig
from cotrain.engine import derived, loading
from cotrain.engine.worker import EngineWorker
from cotrain.models.loading import resolve_model
from cotrain.weights.payload import WeightUpdateRefused
from drafters.config import DFlashConfig
from tests.engine.conftest import AUX_LAYERS, DRAFT_VOCABULARY, LiveEngine, make_requests, tokens
from tests.engine.mtp_head import (
    Target,
    live,  # noqa: F401
    running,
    test_a_swap_in_mid_generation_changes_no_token,  # noqa: F401
    test_acceptance_rises_after_a_swap_and_greedy_output_stays,  # noqa: F401
    test_expected_acceptance_is_served,  # noqa: F401
    test_greedy_output_is_identical_without_speculation,  # noqa: F401
    test_what_is_served_is_what_was_trained,  # noqa: F401
)
from tests.engine.test_speculation_engine import K, accepted_at, draft_lengths, share_equal

pytestmark = pytest.mark.engine

DFLASH = DFlashConfig(type="dflash", draft_vocab_size=DRAFT_VOCABULARY, aux_layers=AUX_LAYERS, trained_depth=3)


def spoil_next_copies(worker: EngineWorker) -> None:
    """Let the copies that are made after the next update be of other weights."""

    def make_wrongly(model: torch.nn.Module) -> None:
        loading.derive_again = derived.derive_again
        derived.derive_again(model)
        for drafter in derived._block_drafters(model):
            drafter._fused_kv_weight[0] += 1

    loading.derive_again = make_wrongly


EngineWorker.spoil_next_copies = spoil_next_copies  # type: ignore[attr-defined]  # the engine core is forked from this process


@pytest.fixture(scope="module")
def target(rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    checkpoint = tmp_path_factory.mktemp("block") / "v0"
    with running(resolve_model("tiny:llama"), rollout_config, checkpoint, DFLASH) as target:
        yield target


def test_one_switched_on_in_mid_request_has_read_what_came_before(target: Target, live: LiveEngine) -> None:  # noqa: F811
    """It accepts as much, place for place, as one that was on all the time."""
    live.run(live.engine.clear_drafter_cache())
    draft_lengths(live, K)
    reference = accepted_at(live, 50, undrafted=1)
    draft_lengths(live, K, 0)
    live.run(live.engine.clear_drafter_cache())
    live.run(live.engine.on_workers(EngineWorker.read_prompts, True))
    share, number = share_equal(accepted_at(live, 50, undrafted=21), reference)
    assert number >= 20 and share > 0.95


def test_an_update_whose_copies_are_stale_is_refused(target: Target, live: LiveEngine) -> None:  # noqa: F811
    before = live.greedy(make_requests(8))
    live.run(live.engine.on_workers(EngineWorker.spoil_next_copies))  # type: ignore[attr-defined]
    with pytest.raises(WeightUpdateRefused, match="k_proj"):
        live.send_drafter(target.untrained.state_for_serving())
    after = live.greedy(make_requests(8))
    assert tokens(after) == tokens(before)
    assert after.speculation.acceptance_length == pytest.approx(before.speculation.acceptance_length, abs=0.05)
