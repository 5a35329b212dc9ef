"""Faults 1, 3, 7 and 12. Two of them are of one engine, whose drafter folder has no head of its own and layer ids that
are off by one; neither hides the other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cotrain.config.load import load_config
from cotrain.config.schema import DrafterConfig, RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.process.failures import SelfCheckFailed
from cotrain.process.scratch import scratch_folder
from cotrain.publish.alarms import check_step
from cotrain.trainer.self_check import check_features
from cotrain.weights.payload import WeightUpdateRefused, digest
from drafters.base import Drafter, TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from pipelines.preflight import find_problems
from tests.engine.conftest import AUX_LAYERS, SERVING, LiveEngine, make_requests
from tests.engine.test_feature_tap_engine import HuggingFace
from tests.faults.conftest import Fault
from tests.faults.runs import truncate
from tests.publish_evidence import evidence_of, expected_from

pytestmark = pytest.mark.engine

POSITIONS = 128


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def headless_drafter(target_folder: Path) -> Drafter:
    """Over the target's whole vocabulary, so that an engine lends it the target's head when it brings none."""
    config = Eagle3Config(type="eagle3", draft_vocab_size=512, aux_layers=AUX_LAYERS)
    return build_drafter(config, TargetSpec.from_pretrained(target_folder), seed=0)


@pytest.fixture(scope="module")
def odd(
    headless_drafter: Drafter,
    rollout_config: RolloutConfig,
    target_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveEngine]:
    folder = tmp_path_factory.mktemp("odd") / "drafter"
    headless_drafter.save(folder, torch.float32)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shifted = [layer + 1 for layer in AUX_LAYERS]
    edit_config(folder, eagle_aux_hidden_state_layer_ids=shifted)
    with scratch_folder("odd") as scratch:
        live = LiveEngine(EngineSpec(rollout_config, str(target_folder), str(folder), SERVING, 0, str(scratch)))
        yield live
        live.stop()


def test_1_an_update_for_a_head_that_is_the_targets(
    odd: LiveEngine, headless_drafter: Drafter, target_state: dict[str, torch.Tensor], fault: Fault
) -> None:
    state = headless_drafter.state_for_serving()
    with pytest.raises(WeightUpdateRefused, match=r"not expected: .'lm_head.weight'"):
        odd.send_drafter(state)
    odd.send_drafter({name: tensor for name, tensor in state.items() if name != "lm_head.weight"})
    served = odd.run(odd.engine.served_digests(sorted(target_state), draft=False))
    assert served == {name: digest(tensor) for name, tensor in target_state.items()}
    fault("1b", "drafter update carries lm_head, shared with the target", "update refused", steps=0)


def test_3_layer_ids_off_by_one(odd: LiveEngine, target_model: Any, fault: Fault) -> None:
    batch = odd.generate(make_requests(4))
    with pytest.raises(SelfCheckFailed, match=r"configured \[2, 4, 5\], they look like layers \[3, 5"):
        check_features(batch, HuggingFace(target_model).hidden_states, "float32")
    fault("3", "aux layer ids + 1 in the served drafter's config.json", "check of the first step's features", steps=1)


def test_12_rollouts_beyond_the_drafters_positions(
    rollout_config: RolloutConfig, target_folder: Path, fitted_drafter: Drafter, tmp_path: Path, fault: Fault
) -> None:
    """vLLM drafts token 0, for all requests of a batch, as soon as one has passed the limit; it says nothing."""
    fitted_drafter.save(tmp_path / "drafter", torch.float32)
    edit_config(tmp_path / "drafter", max_position_embeddings=POSITIONS)
    with scratch_folder("short") as scratch:
        spec = EngineSpec(rollout_config, str(target_folder), str(tmp_path / "drafter"), SERVING, 0, str(scratch))
        live = LiveEngine(spec)
        try:
            within = live.generate(make_requests(8))
            beyond = live.generate(make_requests(8, length=POSITIONS + 20))
        finally:
            live.stop()
    for batch, found in ((within, []), (beyond, ["acceptance_collapsed"])):
        evidence = evidence_of(batch, batch.rollouts[0].versions, expected=expected_from(within.rollouts))
        alarms = check_step(evidence, DrafterConfig(model={"type": "eagle3"}), total_steps=100)
        assert [alarm.name for alarm in alarms] == found
    assert "max_position_embeddings" in str(alarms[0])
    fault("12b", "rollouts longer than the served drafter's positions", "acceptance_collapsed", steps=1)


def test_12_such_a_drafter_is_refused_before_anything_loads(
    untrained_drafter: Drafter, tmp_path: Path, fault: Fault
) -> None:
    untrained_drafter.save(tmp_path / "short", torch.float32)
    edit_config(tmp_path / "short", max_position_embeddings=POSITIONS)
    overrides = [f"drafter.init={tmp_path}/short", f"run_root={tmp_path}", "drafter.model.aux_layers=none"]
    found = find_problems(load_config(["configs/smoke.toml"], overrides))
    assert re.search(r"drafter.init: .* has 128 positions .* but 284 are needed", "\n".join(found))
    fault("12a", "drafter.init with fewer positions than the rollouts", "refused before loading", steps=0)


def test_7_a_truncated_drafter_is_refused_before_anything_loads(
    untrained_drafter: Drafter, tmp_path: Path, fault: Fault
) -> None:
    untrained_drafter.save(tmp_path / "half", torch.float32)
    truncate(tmp_path / "half" / "model.safetensors")
    overrides = [f"drafter.init={tmp_path}/half", f"run_root={tmp_path}"]
    found = find_problems(load_config(["configs/smoke.toml"], overrides))
    assert re.search(r"drafter.init: .* truncated or corrupt", "\n".join(found))
    fault("7a", "drafter.init half written", "refused before loading", steps=0)
