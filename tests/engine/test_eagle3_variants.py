"""EAGLE-3 with every variation that vLLM serves: each draft in the engine is the one that training computes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.process.scratch import scratch_folder
from drafters.base import Drafter, TargetSpec, TargetWeights
from drafters.build import build_drafter, load_drafter
from drafters.eagle3.model import Eagle3Drafter
from tests.engine.conftest import LiveEngine, eagle3, fitted, make_requests, text_of
from tests.engine.test_sliding_window import accepted

pytestmark = [pytest.mark.engine, pytest.mark.long]

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False,
    "mscale": 0.7, "mscale_all_dim": 0.5,
}  # fmt: skip
FLAGS = {"norm_output": True, "norm_before_fc": True, "fc_norm": False}


def variant(folder: Path, config: dict[str, Any], flags: dict[str, bool], sizes: dict[str, Any]) -> Drafter:
    shape = build_drafter(eagle3(**config), TargetSpec.from_pretrained(folder), seed=1).shape
    shape = dataclasses.replace(shape, sizes=dataclasses.replace(shape.sizes, **sizes), **flags)
    drafter = Eagle3Drafter(shape)
    drafter.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(2))
    return drafter


@pytest.mark.parametrize(
    ("config", "flags", "sizes"),
    [
        ({"num_layers": 2, "aux_layers": (1, 2, 4, 5)}, FLAGS, {"attention_bias": True}),
        ({}, {}, {"rope_parameters": YARN}),
    ],
    ids=["layers, norms and biases", "yarn"],
)
def test_every_draft_is_the_one_that_training_computes(
    config, flags, sizes, target_folder: Path, target_model: Any, target_weights: TargetWeights,
    rollout_config: RolloutConfig, tmp_path: Path,
) -> None:  # fmt: skip
    drafter = variant(target_folder, config, flags, sizes)
    layers = drafter.serving.aux_layers
    drafter = fitted(drafter, text_of(target_model, layers), target_weights)
    drafter.save(tmp_path / "drafter", torch.float32)
    assert load_drafter(tmp_path / "drafter", TargetSpec.from_pretrained(target_folder)).shape == drafter.shape
    rollout = rollout_config.model_copy(update={"draft_sample_method": "greedy"})
    with scratch_folder("test-variants") as scratch:
        spec = EngineSpec(rollout, str(target_folder), str(tmp_path / "drafter"), drafter.serving, 0, str(scratch))
        live = LiveEngine(spec)
        live.send_drafter(drafter.state_for_serving())  # an update of every tensor, read back
        batch = live.greedy(make_requests(16), tap=False)
        live.stop()
    steps = [step for r in batch.rollouts for step in accepted(r, drafter, target_model, target_weights, layers)]
    assert len(steps) > 100 and all(taken == expected for taken, expected in steps)
    assert sum(taken for taken, _ in steps) > 50
