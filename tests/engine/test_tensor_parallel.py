"""An engine of two tensor-parallel ranks, on a target whose only head of keys and values both ranks hold."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.process.scratch import scratch_folder
from cotrain.records import Rollout, RolloutBatch, Segment
from cotrain.rollout.tap_admission import TapRequest
from cotrain.rollout.vllm.arguments import EngineSpec
from cotrain.rollout.vllm.weight_transfer import of_all_ranks
from cotrain.rollout.vllm.worker_extension import CotrainWorker
from cotrain.trainer.self_check import relative_error
from cotrain.transport.features import read_shard
from cotrain.transport.payload import WeightUpdateRefused, digest
from drafters.base import Drafter
from tests.engine.conftest import (
    AUX_LAYERS,
    SERVING,
    LiveEngine,
    distilled,
    features_of,
    make_requests,
    moved,
    text_of,
    tokens,
    weights_of,
)

pytestmark = pytest.mark.engine

State = dict[str, torch.Tensor]


class BothRanksTap(CotrainWorker):
    """A worker whose ranks all tap, and which can be given a fault on one of them."""

    def cotrain_start_tapping(self, requests: dict[str, tuple[str, int, int]]) -> None:
        self._cotrain_hook.tap.start({name: TapRequest(*fields) for name, fields in requests.items()})

    def cotrain_take_features(self, rollouts: dict, path: str, shared: dict[str, Any]) -> Any:
        return super().cotrain_take_features(rollouts, f"{path}.{self.rank}", shared)

    def cotrain_flip(self, draft: bool, name: str, rank: int) -> None:
        """Change one element of a parameter that this rank serves; the same call takes the change back."""
        if self.rank == rank:
            model = self._cotrain_weights[draft].model
            parameter = model.get_parameter(name).data.view(-1)
            parameter[-1] = -parameter[-1]

    def cotrain_spoil_next_load(self, draft: bool, name: str, rank: int) -> None:
        """The next load of weights puts something else into this rank's shard of a tensor."""
        model = self._cotrain_weights[draft].model
        load = model.load_weights

        def load_wrongly(tensors: Any) -> Any:
            del model.load_weights
            changed = ((n, t + 1 if n == name and self.rank == rank else t) for n, t in tensors)
            return load(changed)

        model.load_weights = load_wrongly

    def cotrain_kept(self) -> list[list[str]]:
        folder = self._cotrain_weights[False]._kept.parent
        return of_all_ranks(sorted(path.name for path in folder.iterdir()))


@pytest.fixture(scope="module")
def target_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with the first of its two heads of keys and values alone."""
    folder = shutil.copytree(target_folder, tmp_path_factory.mktemp("one-head") / "target")
    config = json.loads((target_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    state = load_file(target_folder / "model.safetensors")
    halved = {n: t[: len(t) // 2].contiguous() if ".k_proj." in n or ".v_proj." in n else t for n, t in state.items()}
    save_file(halved, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def policy(target_folder: Path) -> State:
    return load_file(target_folder / "model.safetensors")


@pytest.fixture(scope="module")
def drafter(model: Any, policy: State, target_folder: Path) -> Drafter:
    return distilled(text_of(model, AUX_LAYERS), weights_of(policy), target_folder)


@pytest.fixture(scope="module")
def live(
    rollout_config: RolloutConfig, target_folder: Path, drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    worker = f"{__name__}.{BothRanksTap.__name__}"
    own = {"tensor_parallel_size": 2, "worker_extension_cls": worker}
    config = rollout_config.model_copy(update={"vllm": rollout_config.vllm | own})
    folder = tmp_path_factory.mktemp("drafter") / "v0"
    drafter.save(folder, torch.float32)
    with scratch_folder("test") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), str(folder), SERVING, 0, str(scratch)))
        yield live
        live.stop()


def test_it_runs(live):
    b = live.greedy(make_requests(8))
    print(b.speculation, b.seconds)
