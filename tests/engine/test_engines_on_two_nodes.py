"""An engine on each of two Ray nodes: weights reach both or none, and what is lost does not take the run with it."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cotrain.actors.engines import RolloutEngines
from cotrain.config.load import load_config
from cotrain.config.schema import RolloutConfig
from cotrain.process.failures import RunFailure
from cotrain.records import Rollout, Versions
from cotrain.run.provenance import package_versions
from cotrain.transport.nodes import Coming, Nodes
from cotrain.weights.payload import WeightUpdateRefused, write_payload
from cotrain.weights.versions import CurrentWeights
from drafters.base import Drafter
from tests.engine.conftest import ROOT, SERVING, make_requests, tokens
from tests.engine.two_nodes import TwoNodes, cut_off
from tests.engine.watched_run import flip_a_byte

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def together(
    address: str, target_folder: Path, drafter_folder: Path, rollout_config: RolloutConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RolloutEngines, Nodes, Any, list[Any]]]:  # fmt: skip
    """An engine on each node, in this process's hands."""
    from cotrain.process.cluster import Cluster

    folder = tmp_path_factory.mktemp("two")
    overrides = [f"cluster.address={address}", "cluster.strategy=SPREAD", "rollout.num_engines=2"]
    config = load_config([ROOT / "configs/smoke.toml"], [*overrides, "policy.num_processes=1"])
    config = config.model_copy(update={"rollout": rollout_config.model_copy(update={"num_engines": 2})})
    cluster = Cluster(config, folder)
    nodes = Nodes(cluster, "two")
    (folder / "config.json").write_text("{}")
    nodes.check(folder / "config.json", "tiny:llama")
    begun: list[Any] = []
    current = CurrentWeights(Versions(0, 0))
    engines = RolloutEngines(cluster, nodes, config, current, lambda *start: begun.append(start))
    cluster.get(engines.start(SERVING, 0, drafter_folder))
    yield engines, nodes, cluster, begun
    nodes.close()
    cluster.stop()


def test_weights_reach_both_nodes_or_none(
    together: tuple[RolloutEngines, Nodes, Any, list[Any]], fitted_drafter: Drafter, moved_target_state: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engines, nodes, cluster, _ = together
    assert len(set(engines.node_of)) == len(nodes.scratch) == 2
    first, second = (
        {
            name: t * (1 + i / 8) if t.is_floating_point() else t
            for name, t in fitted_drafter.state_for_serving().items()
        }
        for i in (0, 1)
    )
    good = write_payload(first, nodes.scratch[nodes.local] / "drafter.safetensors", torch.float32)
    engines.update_drafter(good, 1)
    assert engines.served_digests(sorted(good.digests), True) == [good.digests] * 2
    policy = write_payload(moved_target_state, nodes.scratch[nodes.local] / "policy.safetensors", torch.float32)
    engines.update_policy(policy, 1)
    assert engines.served_digests(sorted(policy.digests), False) == [policy.digests] * 2

    better = write_payload(second, nodes.scratch[nodes.local] / "drafter.safetensors", torch.float32)
    arrived = nodes.arrived

    def flip(coming: Coming) -> str:
        there = arrived(coming)
        if coming.reference is not None:  # the file is in the other node's shared memory alone
            node = nodes._node_of(there)
            cluster.get([nodes._agents[node].__ray_call__.remote(lambda _, path: flip_a_byte(path), there)])
        return there

    monkeypatch.setattr(nodes, "arrived", flip)
    with pytest.raises(WeightUpdateRefused, match="checksum differs"):
        engines.update_drafter(better, 2)
    monkeypatch.undo()
    assert engines.served_digests(sorted(good.digests), True) == [good.digests] * 2
    generating = [engines.begin_generate(engine, make_requests(2, first=2 * engine), True) for engine in (0, 1)]
    batches = cluster.get(generating)
    assert {rollout.versions for batch in batches for rollout in batch.rollouts} == {Versions(1, 1)}
    brought = [nodes.bring(path, nodes.local, move=True) for batch in batches for path in batch.features]
    assert len(brought) == 2 and all(Path(shard).is_relative_to(nodes.scratch[nodes.local]) for shard in brought)


def texts(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids for rollout in rollouts]


def alike(some: list[list[int]], others: list[list[int]]) -> bool:
    """Are they the same but for one? Batches of other sizes round otherwise, which can turn a near-tie of two tokens."""
    return sum(a != b for a, b in zip(some, others, strict=True)) <= 1


def test_an_engine_that_dies_in_mid_generation_comes_back_with_what_is_of_record(
    together: tuple[RolloutEngines, Nodes, Any, list[Any]],
) -> None:
    engines, _, cluster, begun = together
    requests = [replace(request, seed=None) for request in make_requests(8)]
    greedy = {"temperature": 0.0, "seed": None}
    alone = texts(engines.generate(requests[:4], **greedy))
    digests = [engines._current.policy.digests, engines._current.drafter.digests]  # type: ignore[union-attr]
    pid = cluster._ray.get(engines._actors[1].__ray_call__.remote(lambda actor: os.getpid()))
    core = psutil.Process(pid).children(recursive=True)[0].pid  # looked up before, since the generation is short
    started = [engines._actors[e].call.remote("generate", requests[:4], False, **greedy) for e in (0, 1)]
    os.kill(core, signal.SIGKILL)
    [survivor] = cluster.get(started[:1])
    assert alike(tokens(survivor), alone)
    with pytest.raises(RunFailure) as failure:
        cluster.get(started[1:])
    engines.lose(1, failure.value)
    assert engines.in_dispatch == [0] and alike(texts(engines.generate(requests[:4], **greedy)), alone)
    [(starting, started, _)] = begun
    started(*cluster.get([starting]))
    begun.clear()
    assert engines.in_dispatch == [0, 1]
    for of_record, draft in zip(digests, (False, True), strict=True):
        assert engines.served_digests(sorted(of_record), draft) == [of_record] * 2
    assert alike(texts(engines.generate(requests[:4], **greedy)), alone)


def test_a_node_with_other_software_another_model_or_without_the_run_folder_is_refused(
    together: tuple[RolloutEngines, Nodes, Any, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, nodes, _, _ = together
    call = nodes.call
    marker = tmp_path / "config.json"
    marker.write_text("{}")

    def other(node: str, function: Callable[..., Any], *args: Any) -> Any:
        found = call(node, function, *args)
        if node == nodes.local:
            return found
        if function is package_versions:
            return found | {"torch": "2.0.0"}
        return None if args == (marker,) else (found[0], {"model": "another"})

    nodes.check(marker, "tiny:llama")
    monkeypatch.setattr(nodes, "call", other)
    with pytest.raises(RunFailure) as failure:
        nodes.check(marker, "tiny:llama")
    message = str(failure.value)
    assert "torch is " in message and "2.0.0 on " in message and "; install the same version on each" in message
    assert f"does not see {tmp_path}; set run_root to a folder that all nodes share" in message
    assert "has another policy.model, or elsewhere" in message


def test_a_node_that_is_gone_takes_its_engine_with_it_and_nothing_else(
    two_nodes: TwoNodes, together: tuple[RolloutEngines, Nodes, Any, list[Any]], target_state: dict[str, torch.Tensor]
) -> None:
    engines, nodes, _, begun = together
    [remote] = nodes.scratch.keys() - {nodes.local}
    gone = engines.node_of.index(remote)
    cut_off(two_nodes.second)
    policy = write_payload(target_state, nodes.scratch[nodes.local] / "policy.safetensors", torch.float32)
    engines.update_policy(policy, 2)
    assert engines.in_dispatch == [1 - gone] and begun == []
    assert {rollout.versions.policy for rollout in engines.generate(make_requests(4))} == {2}
