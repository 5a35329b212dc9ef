"""Placement on GPUs. Actors on a real Ray are part of the end-to-end tests."""

import socket

import pytest

from cotrain.cluster import Placement, free_port, place


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


def test_a_free_port_can_be_bound():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
