"""Weight updates on a real engine: what they change, what they must not, and what is refused."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file

from cotrain.process.failures import RunFailure
from cotrain.records import WeightPayload
from cotrain.weights.payload import WeightUpdateRefused, digest
from drafters.base import Drafter
from tests.engine.conftest import LiveEngine, make_requests, tokens

pytestmark = pytest.mark.engine


def test_acceptance_rises_after_a_swap_and_greedy_output_stays(fresh: LiveEngine, fitted_drafter: Drafter) -> None:
    before = fresh.greedy(make_requests(16))
    fresh.send_drafter(fitted_drafter.state_for_serving())
    after = fresh.greedy(make_requests(16))
    assert before.speculation.acceptance_length < 1.3
    assert after.speculation.acceptance_length > before.speculation.acceptance_length + 0.5
    assert tokens(after) == tokens(before)


def test_greedy_output_is_identical_without_speculation(fresh: LiveEngine, fitted_drafter: Drafter) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    speculated = fresh.greedy(make_requests(16))
    fresh.run(fresh.engine.set_num_speculative_tokens(0))
    plain = fresh.greedy(make_requests(16))
    assert speculated.speculation and not plain.speculation
    assert tokens(plain) == tokens(speculated)


def test_a_swap_in_mid_generation_changes_no_token(
    fresh: LiveEngine, fitted_drafter: Drafter, untrained_drafter: Drafter
) -> None:
    reference = fresh.greedy(make_requests(8))
    states = [fitted_drafter.state_for_serving(), untrained_drafter.state_for_serving()]

    async def generate_and_swap():
        task = asyncio.create_task(fresh.engine.generate(make_requests(8), temperature=0.0, seed=None))
        swaps = 0
        while not task.done():
            await fresh.engine.update_drafter(fresh.payload(states[swaps % 2]), fresh.engine.versions.drafter + 1)
            swaps += 1
        return await task, swaps

    batch, swaps = fresh.run(generate_and_swap())
    assert swaps >= 3
    assert tokens(batch) == tokens(reference)


def test_what_is_served_is_what_was_sent(
    fresh: LiveEngine, fitted_drafter: Drafter, moved_target_state: dict[str, torch.Tensor]
) -> None:
    drafter = fitted_drafter.state_for_serving()
    fresh.send_drafter(drafter)
    fresh.send_policy(moved_target_state)
    served = fresh.run(fresh.engine.served_digests(list(drafter), draft=True))
    assert served == {name: digest(tensor) for name, tensor in drafter.items()}
    served = fresh.run(fresh.engine.served_digests(list(moved_target_state), draft=False))
    assert served == {name: digest(tensor) for name, tensor in moved_target_state.items()}


def test_a_drafter_swap_changes_no_target_weight_and_the_other_way_round(
    fresh: LiveEngine, fitted_drafter: Drafter, target_state: dict, moved_target_state: dict
) -> None:
    def served(state: dict, draft: bool) -> dict[str, str]:
        return fresh.run(fresh.engine.served_digests(list(state), draft=draft))

    drafter = fitted_drafter.state_for_serving()
    target_before = served(target_state, draft=False)
    fresh.send_drafter(drafter)
    assert served(target_state, draft=False) == target_before
    drafter_before = served(drafter, draft=True)
    fresh.send_policy(moved_target_state)
    assert served(drafter, draft=True) == drafter_before
    assert served(target_state, draft=False) != target_before


def test_a_target_update_alone_lowers_acceptance(
    fresh: LiveEngine, fitted_drafter: Drafter, moved_target_state: dict
) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    before = fresh.generate(make_requests(16)).speculation.acceptance_length
    fresh.send_policy(moved_target_state)
    assert fresh.generate(make_requests(16)).speculation.acceptance_length < before - 0.1


def test_a_target_update_is_seen_by_cached_prompts(
    fresh: LiveEngine, target_state: dict, moved_target_state: dict
) -> None:
    prompts = make_requests(4, length=280)
    fresh.greedy(prompts)
    fresh.send_policy(moved_target_state)
    after_update = tokens(fresh.greedy(prompts))
    fresh.run(fresh.engine.reset_prefix_cache())
    assert tokens(fresh.greedy(prompts)) == after_update


def test_versions_travel_with_rollouts_and_never_go_back(fresh: LiveEngine, untrained_drafter: Drafter) -> None:
    fresh.send_drafter(untrained_drafter.state_for_serving())
    versions = fresh.engine.versions
    assert fresh.greedy(make_requests(1)).rollouts[0].versions == versions
    with pytest.raises(ValueError, match="older than the served"):
        fresh.run(fresh.engine.update_drafter(fresh.payload({}), versions.drafter - 1))


def _nan(state: dict) -> dict:
    return state | {"norm.weight": state["norm.weight"] * float("nan")}


def _half_precision(state: dict) -> dict:
    return state | {"fc.weight": state["fc.weight"].half()}


CORRUPTIONS = {
    "non-finite": (_nan, "norm.weight has non-finite values"),
    "missing": (lambda s: {k: v for k, v in s.items() if k != "fc.weight"}, "missing: .'fc.weight'"),
    "extra": (lambda s: s | {"surprise.weight": torch.zeros(2)}, "not expected: .'surprise.weight'"),
    "embedding": (lambda s: s | {"embed_tokens.weight": torch.zeros(512, 128)}, "not expected: .'embed_tokens"),
    "shape": (lambda s: s | {"fc.weight": s["fc.weight"][:, :-1].contiguous()}, "fc.weight is .128, 383."),
    "dtype": (_half_precision, "fc.weight is .* torch.float16"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_bad_update_is_refused_and_the_old_weights_stay(
    kind: str, fresh: LiveEngine, fitted_drafter: Drafter
) -> None:
    corrupt, message = CORRUPTIONS[kind]
    good = fitted_drafter.state_for_serving()
    fresh.send_drafter(good)
    reference = fresh.greedy(make_requests(8))
    bad = {name: tensor.contiguous() for name, tensor in corrupt(good).items()}
    path = fresh.scratch / "bad.safetensors"
    save_file(bad, path)
    payload = WeightPayload(str(path), path.stat().st_size, {name: digest(tensor) for name, tensor in bad.items()})
    with pytest.raises(WeightUpdateRefused, match=message):
        fresh.run(fresh.engine.update_drafter(payload, fresh.engine.versions.drafter + 1))
    assert_serves(fresh, good, reference)


@pytest.mark.parametrize("kind", ["truncated", "changed"])
def test_a_damaged_file_is_refused_and_the_old_weights_stay(
    kind: str, fresh: LiveEngine, fitted_drafter: Drafter
) -> None:
    good = fitted_drafter.state_for_serving()
    fresh.send_drafter(good)
    reference = fresh.greedy(make_requests(8))
    payload = fresh.payload(good)
    if kind == "truncated":
        with open(payload.path, "r+b") as file:
            file.truncate(payload.num_bytes // 2)
    else:
        state = load_file(payload.path)
        save_file(state | {"norm.weight": state["norm.weight"] + 1e-3}, payload.path)
    with pytest.raises(WeightUpdateRefused, match="cannot read" if kind == "truncated" else "checksum differs"):
        fresh.run(fresh.engine.update_drafter(payload, fresh.engine.versions.drafter + 1))
    assert_serves(fresh, good, reference)


def test_an_engine_that_cannot_go_back_to_its_last_weights_stops_the_run(
    fresh: LiveEngine, fitted_drafter: Drafter
) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    with open(fresh.scratch / "kept" / "rank_0" / "drafter.before", "r+b") as good_state:
        good_state.truncate(1000)
    with pytest.raises(RunFailure, match=r"a weight update failed, and .*the engine's weights are unknown"):
        fresh.run(fresh.engine.undo_drafter_update())


def test_a_bad_policy_update_is_refused(fresh: LiveEngine, target_state: dict) -> None:
    reference = tokens(fresh.greedy(make_requests(4)))
    broken = target_state | {"model.norm.weight": target_state["model.norm.weight"] * float("inf")}
    with pytest.raises(WeightUpdateRefused, match="non-finite"):
        fresh.send_policy(broken)
    assert tokens(fresh.greedy(make_requests(4))) == reference


def assert_serves(live: LiveEngine, state: dict[str, torch.Tensor], reference) -> None:
    served = live.run(live.engine.served_digests(list(state), draft=True))
    assert served == {name: digest(tensor) for name, tensor in state.items()}
    batch = live.greedy(make_requests(8))
    assert tokens(batch) == tokens(reference)
    assert batch.speculation.acceptance_length > 1.3
