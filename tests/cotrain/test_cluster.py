"""Placement on GPUs and the scratch folder. Actors on a real Ray are part of the end-to-end tests."""

import os
import socket
import subprocess
import sys

import pytest

from cotrain import cluster
from cotrain.cluster import Placement, free_port, place, scratch_folder


def placed(run_config, num_gpus: int, engines: int = 1, learners: int = 1, **changes) -> Placement:
    config = run_config(**changes)
    rollout = config.rollout.model_copy(update={"num_engines": engines})
    policy = config.policy.model_copy(update={"num_processes": learners})
    return place(config.model_copy(update={"rollout": rollout, "policy": policy}), num_gpus)


def test_without_a_gpu_everything_is_on_the_cpu(run_config):
    assert placed(run_config, 0) == Placement("cpu", 0, 0, 0)


def test_the_configuration_can_leave_gpus_alone(run_config):
    assert placed(run_config, 8, cluster={"device": "cpu"}) == Placement("cpu", 0, 0, 0)


def test_asking_for_a_gpu_that_is_not_there_is_an_error(run_config):
    with pytest.raises(ValueError, match=r'cluster\.device = "cuda", but Ray sees no GPU; use "auto" or "cpu"'):
        placed(run_config, 0, cluster={"device": "cuda"})


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_every_process_gets_a_gpu_when_there_are_enough(run_config, device):
    assert placed(run_config, 3, cluster={"device": device}) == Placement("cuda", 1, 1, 1)
    assert placed(run_config, 8, engines=4, learners=2) == Placement("cuda", 1, 1, 1)


def test_a_run_without_drafter_needs_one_process_less(run_config):
    assert placed(run_config, 2, drafter=None) == Placement("cuda", 1, 1, 1)


@pytest.mark.parametrize("num_gpus", range(1, 9))
@pytest.mark.parametrize(("engines", "learners"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_all_processes_find_room(run_config, num_gpus, engines, learners):
    """Ray gives a process its share of one GPU; a share that only fits in sum would leave an actor pending forever."""
    placement = placed(run_config, num_gpus, engines, learners)
    shares = [placement.engine_gpus] * engines + [placement.learner_gpus] * learners + [placement.drafter_gpus]
    room = [1.0] * num_gpus
    for share in shares:
        gpu = max(range(num_gpus), key=lambda g: room[g])
        room[gpu] -= share
        assert room[gpu] >= -1e-9


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """A base folder of the test's own instead of /dev/shm."""
    monkeypatch.setattr(cluster.os, "access", lambda path, mode: False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_leftovers_of_dead_runs_are_removed_and_live_ones_stay(shared_memory):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    leftover, own_pid, foreign = (
        shared_memory / name
        for name in (f"cotrain-old-run-{ended.pid}", f"cotrain-before-us-{os.getpid()}", "cotrain-my-notes")
    )
    live = shared_memory / f"cotrain-other-{os.getppid()}"
    for folder in (leftover, own_pid, foreign, live):
        folder.mkdir()
        (folder / "features.safetensors").write_bytes(b"x")
    scratch = scratch_folder("first")
    assert scratch == shared_memory / f"cotrain-first-{os.getpid()}"
    assert not leftover.exists()
    assert not own_pid.exists(), "an earlier process had our pid"
    assert (foreign / "features.safetensors").exists()
    assert (live / "features.safetensors").exists()


def test_the_scratch_folder_is_in_shared_memory():
    scratch = scratch_folder("test-of-scratch")
    assert scratch.parent.as_posix() == "/dev/shm"
    scratch.rmdir()


def test_a_free_port_can_be_bound():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
