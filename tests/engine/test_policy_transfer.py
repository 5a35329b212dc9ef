"""The policy straight from the learner's memory into the engines. On a CPU by gloo; on GPUs by vLLM's NCCL or IPC.

One command shows what only GPUs can: `pytest tests/engine/test_policy_transfer.py`, with NCCL on three GPUs or more, by IPC
on a single one.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import cotrain.actors.policy
from cotrain.actors.engines import RolloutEngines
from cotrain.actors.policy import Policy, PolicyActor, start_policy
from cotrain.config.schema import PolicyConfig, RolloutConfig, RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.policy.learner import PolicyLearner
from cotrain.process.failures import RunFailure
from cotrain.records import Versions, WeightPayload
from cotrain.transport.nodes import Nodes
from cotrain.weights.payload import write_payload
from cotrain.weights.versions import CurrentWeights
from drafters.base import Drafter
from drafters.files import WEIGHTS
from tests.engine.conftest import SERVING, make_requests
from tests.engine.test_isolation import make_rollouts

pytestmark = pytest.mark.engine

GPUS = torch.cuda.device_count()
BACKEND = "nccl" if GPUS > 2 else "ipc" if GPUS == 1 else "gloo"


class GlooPolicyActor(PolicyActor):
    """A learner in whose process the sender is gloo's."""

    def start(self, create: Callable[[], Any]) -> None:
        from cotrain.engine import policy_sender
        from tests.engine.gloo_transfer import GlooInitInfo

        policy_sender.NCCLTrainerInitInfo = GlooInitInfo  # type: ignore[misc]
        super().start(create)


@pytest.fixture(scope="module")
def begun() -> list[Any]:
    """Engines that are being started again: reference, and handlers of its result and of a death."""
    return []


@pytest.fixture(scope="module")
def roles(
    begun: list[Any],
    target_folder: Path,
    drafter_folder: Path,
    rollout_config: RolloutConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RolloutEngines, Policy, Nodes, Any]]:
    from cotrain.process.cluster import Cluster

    folder = tmp_path_factory.mktemp("transfer")
    own = {"worker_extension_cls": "tests.engine.gloo_transfer.GlooWorker"} if BACKEND == "gloo" else {}
    rollout = rollout_config.model_copy(update={"num_engines": 2, "vllm": rollout_config.vllm | own})
    policy = PolicyConfig(model="tiny:llama").model_copy(update={"weight_transfer": BACKEND})
    task = {"type": "reasoning_gym", "name": "chain_sum"}
    config = RunConfig.model_validate({"name": "transfer", "steps": 4, "policy": {"model": "tiny:llama"}, "task": task})
    config = config.model_copy(update={"policy": policy, "rollout": rollout})
    with pytest.MonkeyPatch.context() as patch:
        if BACKEND == "gloo":
            patch.setattr(cotrain.actors.policy, "PolicyActor", GlooPolicyActor)
        cluster = Cluster(config, folder)
        nodes = Nodes(cluster, "transfer")
        (folder / "config.json").write_text("{}")
        nodes.check(folder / "config.json", "tiny:llama")
        current = CurrentWeights(Versions(0, 0))
        engines = RolloutEngines(cluster, nodes, config, current, lambda *start: begun.append(start))
        starting = engines.start(SERVING, 0, drafter_folder)
        learner = start_policy(cluster, nodes, config)
        engines.receive_from(learner)
        cluster.get(starting)
        yield engines, learner, nodes, cluster
        nodes.close()
        cluster.stop()


def next_policy(roles: tuple[RolloutEngines, Policy, Nodes, Any], version: int) -> Any:
    """The learner makes an update and writes the file of it."""
    _, learner, nodes, _ = roles
    learner.finish(learner.begin_update(make_rollouts()))
    return learner.write_payload(nodes.scratch[nodes.local] / f"policy_{version}.safetensors")


def compare_all(roles: tuple[RolloutEngines, Policy, Nodes, Any], folder: Path) -> WeightPayload:
    """Both engines serve what the learner has. Returns all of it."""
    at, learner, nodes, _ = roles
    learner.call(PolicyLearner.save, folder)
    whole = write_payload(load_file(folder / WEIGHTS), nodes.scratch[nodes.local] / "all.safetensors", torch.float32)
    for turn in (0, 1):  # each looks at other columns
        looks = False, whole.path, whole.digests, turn
        at.call_all(RolloutEngine.on_workers, EngineWorker.compare, *looks)
    return whole


def test_all_engines_serve_what_the_learner_has_while_they_generate(
    roles: tuple[RolloutEngines, Policy, Nodes, Any], tmp_path: Path
) -> None:
    engines, _, _, cluster = roles
    payload = next_policy(roles, 1)
    running = [engines.begin_generate(engine, make_requests(4), False) for engine in (0, 1)]
    report = engines.update_policy(payload, 1)
    whole = compare_all(roles, tmp_path)
    names = whole.digests.keys()
    assert {name for name in names if "embed" in name or "lm_head" in name} < payload.digests.keys() < names
    assert whole.num_bytes - 2**16 < report.num_bytes < whole.num_bytes  # less the header of the file
    for batch in cluster.get(running):
        assert {rollout.versions.policy for rollout in batch.rollouts} == {1}


def test_an_engine_that_died_comes_back_with_the_next_update_and_the_drafter_of_record(
    roles: tuple[RolloutEngines, Policy, Nodes, Any], begun: list[Any], fitted_drafter: Drafter, tmp_path: Path
) -> None:
    engines, _, nodes, cluster = roles
    pid = cluster._ray.get(engines._actors[1].__ray_call__.remote(lambda actor: os.getpid()))
    core = psutil.Process(pid).children(recursive=True)[0].pid  # looked up before, since the generation is short
    running = engines.begin_generate(1, make_requests(4), False)
    os.kill(core, signal.SIGKILL)
    with pytest.raises(RunFailure) as failure:
        cluster.get([running])
    engines.lose(1, failure.value)
    [(starting, started, _)] = begun
    drafter = write_payload(
        fitted_drafter.state_for_serving(), nodes.scratch[nodes.local] / "drafter.safetensors", torch.float32
    )
    engines.update_drafter(drafter, 1)
    started(*cluster.get([starting]))
    assert engines.in_dispatch == [0]
    engines.update_policy(next_policy(roles, 2), 2)
    assert engines.in_dispatch == [0, 1]
    compare_all(roles, tmp_path)
    assert engines.served_digests(sorted(drafter.digests), True) == [drafter.digests] * 2
    versions = {rollout.versions for rollout in engines.generate(make_requests(4))}
    assert versions == {Versions(2, 1)}


def test_weights_that_are_not_those_of_the_file_quarantine_the_engines(
    roles: tuple[RolloutEngines, Policy, Nodes, Any],
) -> None:
    engines, learner, _, _ = roles
    payload = next_policy(roles, 3)
    learner.finish(learner.begin_update(make_rollouts()))
    with pytest.raises(RunFailure, match="not those that the learner has sent"):
        engines.update_policy(payload, 3)
    assert len(engines.in_dispatch) == 1  # the last one that may be lost ends the run
