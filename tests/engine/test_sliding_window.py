"""A target whose layers all have a sliding window: vLLM gives the drafter's layer the same one, and so it is trained."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.process.scratch import scratch_folder
from cotrain.records import Rollout
from drafters.base import Drafter, SamplingParams, TargetSpec, TargetWeights
from drafters.losses import acceptances
from tests.engine.conftest import AUX_LAYERS, LiveEngine, distilled, features_of, make_requests, text_of

pytestmark = pytest.mark.engine

WINDOW, PROMPT_TOKENS = 24, 40
REQUESTS, NEW_TOKENS, MOST_IN_A_STEP = 16, 96, 4  # three draft tokens and one more


@pytest.fixture(scope="module")
def sliding_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a Mistral, which has the same tensors."""
    folder = tmp_path_factory.mktemp("sliding") / "target"
    shutil.copytree(target_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    sliding = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config | sliding))
    return folder


def accepted(
    rollout: Rollout,
    drafter: Drafter,
    model: torch.nn.Module,
    target: TargetWeights,
    layers: tuple[int, ...] = AUX_LAYERS,
) -> list:
    """Of each verification step with whole drafts: its draft tokens that were accepted, and those that should be."""
    ids, sampling = rollout.prompt_token_ids + rollout.token_ids, SamplingParams(0.0, 1.0, 0, "greedy")
    text = features_of(model, ids, len(rollout.prompt_token_ids), 0, layers)
    [found] = acceptances([drafter], text, target, sampling)
    drawn = dict(
        zip(found.offset.tolist(), found.drawn.T.tolist(), strict=True)
    )  # 1 where the likeliest draft was right
    place, steps = 0, []
    for drafted, taken in rollout.verification_steps:
        if place + drafted < len(rollout.token_ids):
            steps.append((taken, next((i for i, right in enumerate(drawn[place][:drafted]) if right < 1), drafted)))
        place += taken + 1
    return steps


def test_every_draft_is_the_one_that_training_computes(
    sliding_folder: Path, target_weights: TargetWeights, rollout_config: RolloutConfig, tmp_path: Path
) -> None:
    """Beyond the window, whose text decides nearly every draft."""
    model = AutoModelForCausalLM.from_pretrained(sliding_folder, dtype=torch.float32).eval()
    assert TargetSpec.from_pretrained(sliding_folder).sliding_window == WINDOW
    drafter = distilled(text_of(model, AUX_LAYERS), target_weights, sliding_folder)
    drafter.save(tmp_path / "drafter", torch.float32)
    config = rollout_config.model_copy(update={"max_new_tokens": NEW_TOKENS, "draft_sample_method": "greedy"})
    with scratch_folder("test-sliding") as scratch:
        spec = EngineSpec(config, str(sliding_folder), str(tmp_path / "drafter"), drafter.serving, 0, str(scratch))
        live = LiveEngine(spec)
        batch = live.greedy(make_requests(REQUESTS, length=PROMPT_TOKENS), tap=False)
        live.stop()
    steps = [step for r in batch.rollouts for step in accepted(r, drafter, model, target_weights)]
    # However good the drafter is: all steps of a response but perhaps its last have whole drafts.
    assert len(steps) >= REQUESTS * (NEW_TOKENS // MOST_IN_A_STEP - 1)
    assert all(taken == expected for taken, expected in steps)
    whole = dataclasses.replace(drafter.shape, sizes=dataclasses.replace(drafter.shape.sizes, sliding_window=None))
    blind = type(drafter)(whole)
    blind.load_state_dict(drafter.state_dict())
    steps = [step for r in batch.rollouts for step in accepted(r, blind, model, target_weights)]
    assert sum(taken == expected for taken, expected in steps) < len(steps) / 2
