"""Two real processes against one."""

import json
import socket
import time
from pathlib import Path

import pytest
import torch
from policy_cases import make_learner, update_difference
from policy_ddp_rank import VARIANTS, run_rank, train
from safetensors.torch import load_file
from torch import multiprocessing


@pytest.fixture(scope="module")
def two_processes(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_processes")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = multiprocessing.spawn(run_rank, args=(port, tiny_model, str(folder)), nprocs=2, join=False)
    deadline = time.monotonic() + 180
    while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
        if time.monotonic() > deadline:  # ranks that wait for each other would do so for gloo's 30 minutes
            for process in ranks.processes:
                process.kill()
            pytest.fail("the two learner processes did not finish in 180 s")
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_update_like_one(tiny_model: str, two_processes: Path, name: str) -> None:
    learner = make_learner(tiny_model, **VARIANTS[name])
    expected = train(learner, tiny_model)
    single = learner.state_for_serving()
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


def test_a_broken_rollout_of_one_rank_stops_both_with_its_name(two_processes: Path) -> None:
    for rank in range(2):
        assert "not finite: p1/1." in (two_processes / f"error-{rank}").read_text()
