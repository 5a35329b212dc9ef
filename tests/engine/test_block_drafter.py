"""A block drafter of two layers on a real engine."""

from collections.abc import Iterator

import pytest
import torch

from cotrain.config.schema import RolloutConfig
from cotrain.engine import loading
from cotrain.engine.worker import EngineWorker
from cotrain.lossless.setting import PLAIN, Setting
from cotrain.models.loading import resolve_model
from cotrain.trainer.buffer import batches_of
from cotrain.transport.features import read_shard
from cotrain.weights.payload import WeightUpdateRefused
from drafters.config import DFlashConfig
from pipelines.verify.checks import perturbed, target_distributions
from tests.engine import planted_bugs
from tests.engine.conftest import AUX_LAYERS, DRAFT_VOCABULARY, LiveEngine, make_requests, tokens, weights_of
from tests.engine.mtp_head import (
    Target,
    expected_rates,
    live,  # noqa: F401
    running,
    test_a_swap_in_mid_generation_changes_no_token,  # noqa: F401
    test_acceptance_rises_after_a_swap_and_greedy_output_stays,  # noqa: F401
    test_greedy_output_is_identical_without_speculation,  # noqa: F401
    test_what_is_served_is_what_was_trained,  # noqa: F401
)
from tests.engine.planted_bugs import BLOCK_BUGS
from tests.engine.test_speculation_engine import K, accepted_at, draft_lengths, share_equal
from tests.engine.test_verify_engine import ALPHA, CLEAN_ALPHA, TOKENS, plant, verdict

pytestmark = pytest.mark.engine

DFLASH = DFlashConfig(type="dflash", draft_vocab_size=DRAFT_VOCABULARY, aux_layers=AUX_LAYERS, trained_depth=3)


def spoil_next_copies(worker: EngineWorker) -> None:
    """Let the copies that are made after the next update be of other weights."""

    derive_again = loading.derive_again

    def make_wrongly(model: torch.nn.Module) -> None:
        loading.derive_again = derive_again
        derive_again(model)
        for drafter in loading._block_drafters(model):
            drafter._fused_kv_weight[0] += 1

    loading.derive_again = make_wrongly


EngineWorker.spoil_next_copies = spoil_next_copies  # type: ignore[attr-defined]  # the engine core is forked from this process


@pytest.fixture(scope="module")
def target(rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    checkpoint = tmp_path_factory.mktemp("block") / "v0"
    vllm = rollout_config.vllm | {"worker_extension_cls": f"{planted_bugs.__name__}.PlantingWorker"}
    config = rollout_config.model_copy(update={"vllm": vllm})
    with running(resolve_model("tiny:llama"), config, checkpoint, DFLASH) as target:
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


def expected_and_served(target: Target, live: LiveEngine) -> tuple[float, float]:  # noqa: F811
    """Acceptance length of the trained drafter as it is computed from the tap's rows, and as the engine counts it."""
    batch = live.generate(make_requests(128, seed=12))
    records = [record for shard in batch.features for record in read_shard(shard)]
    batches = [rows for rows, _ in batches_of(records, 4096)]
    expected = 1 + sum(expected_rates(target.trained, batches, weights_of(target.state), K))
    return expected, batch.speculation.acceptance_length


OF_VERIFICATION, *OF_THE_DRAFTS = BLOCK_BUGS


@pytest.mark.parametrize("bug", [None, *OF_THE_DRAFTS])
def test_expected_acceptance_is_served_but_with_a_planted_bug_of_the_drafts(
    target: Target,
    live: LiveEngine,  # noqa: F811
    bug: str | None,
) -> None:
    live.send_drafter(target.untrained.state_for_serving())  # for the projection that gets stale
    plant(live, bug)
    try:
        live.send_drafter(target.trained.state_for_serving())
        expected, served = expected_and_served(target, live)
    finally:
        plant(live, None)
    assert expected > 1.5
    assert served < 0.95 * expected if bug else served == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("bug", [None, OF_VERIFICATION])
def test_sampled_text_has_the_targets_distribution_but_with_a_planted_bug_of_verification(
    target: Target,
    live: LiveEngine,  # noqa: F811
    bug: str | None,
) -> None:
    state = target.trained.state_for_serving()
    distributions = target_distributions(target.model, target.trained.draft_to_target.tolist(), "float32")
    drafters = [live.payload(state), live.payload(perturbed(state, seed=0))]
    setting, alpha = Setting(K, "probabilistic", (PLAIN,)), ALPHA if bug else CLEAN_ALPHA
    plant(live, bug)
    try:
        found = verdict(live, distributions, drafters, setting, alpha=alpha, tokens=TOKENS)
    finally:
        plant(live, None)
    assert found.passed == (bug is None), str(found)
