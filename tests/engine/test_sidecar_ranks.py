"""A host's engine of two tensor-parallel ranks: tap, swaps, updates of the policy and failing hooks, on both of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.base import Drafter
from tests.engine.test_sidecar_engine import TOKENS, Sidecar, versions_of
from tests.engine.test_sidecar_hosts import beside, greedy_text

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def ranks(
    target_folder: Path, untrained_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    """The tests below use one engine of two ranks, in their order."""
    with beside(tmp_path_factory.mktemp("ranks"), target_folder, untrained_drafter, "two ranks") as sidecar:
        sidecar.host("report_often")
        yield sidecar


def test_two_ranks_are_tapped_once_and_both_swap_the_drafter(
    ranks: Sidecar, target_folder: Path, fitted_drafter: Drafter, tmp_path: Path
) -> None:
    expected = greedy_text(tmp_path, target_folder, "two ranks")
    assert ranks.state.reason is None
    assert ranks.greedy() == expected
    ranks.settle()
    taken = ranks.take()
    assert sorted(r.token_ids[12:].tolist() for r, _ in taken if r.num_tokens == 12 + TOKENS) == sorted(expected)
    written = load_file(ranks.engine.policies / "0.safetensors")
    checkpoint = load_file(target_folder / "model.safetensors")
    assert {name: len(m) for name, m in written.items()} == {name: len(checkpoint[name]) for name in written}
    assert (
        all(torch.equal(matrix, checkpoint[name]) for name, matrix in written.items()) and "lm_head.weight" in written
    )
    for record, _ in taken:
        last = record.final_hidden[11:-1].float() @ written["lm_head.weight"].T
        assert (last.argmax(1) == record.token_ids[12:]).float().mean() > 0.95
    length = ranks.acceptance_length(5)
    version = ranks.publish(fitted_drafter.state_for_serving())
    assert ranks.greedy() == expected
    assert ranks.acceptance_length(5) > length + 0.2
    ranks.settle()
    assert ranks.state.drafter_version == version and ranks.state.reason is None and not ranks.state.refused


def test_a_drafter_that_is_damaged_is_refused_by_both_ranks(ranks: Sidecar, fitted_drafter: Drafter) -> None:
    length, before = ranks.acceptance_length(6), ranks.state.drafter_version
    state = fitted_drafter.state_for_serving()
    version = ranks.publish({name: tensor * float("nan") for name, tensor in state.items()})
    ranks.wave(7)
    ranks.settle()
    assert "rank 0: " in ranks.state.refused[version] and "rank 1: " in ranks.state.refused[version]
    assert ranks.state.drafter_version == before and ranks.acceptance_length(6) == pytest.approx(length, abs=0.1)


def test_weights_that_change_on_one_rank_are_a_new_version_of_both(ranks: Sidecar) -> None:
    before = ranks.state.policy_version
    ranks.host("write_into_a_parameter_of", 1)
    ranks.wave(8)
    ranks.settle()
    assert ranks.state.policy_version == before + 1
    assert {versions_of(record)[0] for record, _ in ranks.take()} >= {before + 1}
    old, new = (load_file(ranks.engine.policies / f"{n}.safetensors")["lm_head.weight"] for n in (before, before + 1))
    half = len(old) // 2
    assert torch.equal(old[:half], new[:half]) and torch.allclose(1.01 * old[half:], new[half:])


def test_an_update_of_the_hosts_reaches_both_ranks(ranks: Sidecar, target_folder: Path) -> None:
    before, length = ranks.state.policy_version, ranks.acceptance_length(9)
    ranks.host("fill", str(target_folder))
    ranks.wave(8)
    ranks.settle()
    assert ranks.state.policy_version == before + 1 and ranks.state.reason is None
    written = load_file(ranks.engine.policies / f"{before + 1}.safetensors")["lm_head.weight"]
    assert torch.equal(written, load_file(target_folder / "model.safetensors")["lm_head.weight"])
    assert ranks.acceptance_length(9) > length - 0.1


def test_both_ranks_outlive_the_trainer_and_draft_on(ranks: Sidecar, target_folder: Path) -> None:
    expected, length = ranks.greedy(), ranks.acceptance_length(9)
    ranks.spool.remove()
    ranks.host("fill", str(target_folder))  # for which they would load the trainer's drafter again
    assert ranks.greedy() == expected and ranks.acceptance_length(9) > length - 0.1


def test_a_hook_that_fails_on_one_rank_ends_drafting_on_both(ranks: Sidecar) -> None:
    expected = ranks.greedy()
    ranks.host("break_a_hook_of", 1, "_watch")
    for _ in range(4):
        assert ranks.greedy() == expected
    before = ranks.host("counts")["drafts"]
    assert ranks.greedy() == expected and ranks.host("counts")["drafts"] == before > 0
