"""Two real processes against one."""

import json
from pathlib import Path

import pytest
import torch
from policy_cases import free_ports, make_learner, make_rollouts, run_ranks, served_state, update_difference
from policy_ddp_rank import VARIANTS, run_rank, train
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def two_processes(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_processes")
    run_ranks(run_rank, *free_ports(1), tiny_model, str(folder), seconds=180)
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_update_like_one(tiny_model: str, two_processes: Path, name: str) -> None:
    learner = make_learner(tiny_model, **VARIANTS[name])
    expected = train(learner, tiny_model)
    single = served_state(learner)
    ranks = [load_file(two_processes / f"{name}-{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(ranks[0][key], ranks[1][key]) for key in single)
    for key in single:
        assert (ranks[0][key] - single[key]).norm() <= 1e-6 * single[key].norm()
    # AdamW divides by |gradient|, so rounding shows in the update wherever a gradient is almost zero.
    assert update_difference(tiny_model, single, ranks[0]) < 1e-4

    for rank in range(2):
        metrics = json.loads((two_processes / f"{name}-{rank}.json").read_text())
        for step, of_one in zip(metrics, expected, strict=True):
            assert step == pytest.approx(of_one, rel=2e-5, abs=1e-7)


def test_one_process_continues_what_two_have_saved(tiny_model: str, two_processes: Path) -> None:
    name = list(VARIANTS)[-1]
    resumed = make_learner(tiny_model, **VARIANTS[name])
    resumed.load(two_processes / "saved")
    state = served_state(resumed)
    saved = load_file(two_processes / f"{name}-0.safetensors")
    assert state.keys() == saved.keys() and all(torch.equal(state[key], saved[key]) for key in saved)
    [expected] = json.loads((two_processes / "on-0.json").read_text())
    assert resumed.update(make_rollouts(tiny_model, seed=4)) == pytest.approx(expected, rel=2e-5, abs=1e-7)


def test_only_rank_0_computes_what_it_alone_returns(two_processes: Path) -> None:
    assert json.loads((two_processes / "returns-0.json").read_text()) == [True, True, True]
    assert json.loads((two_processes / "returns-1.json").read_text()) == [False, False, False]


def test_a_broken_rollout_of_one_rank_stops_both_with_its_name(two_processes: Path) -> None:
    for rank in range(2):
        assert "not finite: p1/1." in (two_processes / f"error-{rank}").read_text()
