"""A whole run of cotrain's own under vLLM's model runner V2, whose kernels Triton's interpreter runs on the CPU."""

import os
import re
import subprocess
from pathlib import Path
from statistics import fmean

import pytest
import torch

from drafters.alignment import DraftBatch
from drafters.base import TargetWeights
from drafters.config import DFlashConfig
from pipelines.simulate.run_base import recorded
from tests.engine.conftest import AUX_LAYERS, DRAFT_VOCABULARY, distilled
from tests.engine.interpreted_triton import INTERPRETED
from tests.engine.runs import command, metrics_of

pytestmark = [pytest.mark.engine, pytest.mark.long]  # minutes

ROOT = Path(__file__).parents[2]
INTERPRETS = """
import os, sys

class BeforeVllm:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            sys.meta_path.remove(self)
            from tests.engine.interpreted_triton import interpret
            interpret()

sys.meta_path.insert(0, BeforeVllm())
"""
"""Runs at the start of each process of the run."""

RUN = (
    "configs/smoke.toml", "name=v2", "rollout.ignore_eos=true", "rollout.speculation.adaptive=true",
    "rollout.draft_sample_method=probabilistic",
)  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(INTERPRETS)
    own = {"PYTHONPATH": f"{tmp_path / 'start'}:{ROOT}", "VLLM_LOGGING_LEVEL": "INFO"}
    return os.environ | {name: INTERPRETED[name] for name in ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")} | own


def test_a_run_generates_taps_trains_and_swaps(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, *RUN), env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, folder = metrics_of(tmp_path, "v2"), tmp_path / "v2"
    assert "Using V2 Model Runner" in (folder / "logs" / "latest" / "rollout_0.log").read_text()
    assert [row["versions/policy"] for row in rows] == [0, 1, 2]
    assert [row["versions/drafter"] for row in rows] == [0, 0, 1]
    assert all(row["rollout/tapped_rollouts"] and row["rollout/feature_holes"] == 0 for row in rows)
    assert len(set(recorded(folder).engine_steps["k"])) > 1, "the engine chose among draft lengths"
    assert "prompts identical" in done.stdout and "DIFFERS" not in done.stdout
    assert re.search(r"lossless     verified on [\d,]+ sampled tokens, \d+ of them speculated", done.stdout)


def test_a_run_of_dspark_serves_what_training_expects(
    environment: dict[str, str],
    tmp_path: Path,
    sampled_text: DraftBatch,
    target_weights: TargetWeights,
    target_folder: Path,
) -> None:
    config = DFlashConfig(
        type="dspark", draft_vocab_size=DRAFT_VOCABULARY, aux_layers=AUX_LAYERS, trained_depth=3, markov_rank=32
    )
    distilled(sampled_text, target_weights, target_folder, config).save(tmp_path / "first", torch.float32)
    drafter = (
        f"drafter.init={tmp_path / 'first'}", "drafter.model.type=dspark", "drafter.model.trained_depth=3", f"drafter.model.draft_vocab_size={DRAFT_VOCABULARY}",
        "drafter.model.markov_rank=32", "rollout.speculation.adaptive=false", "rollout.prompts_per_step=36",
    )  # fmt: skip
    done = subprocess.run(
        command(tmp_path, *RUN, *drafter), env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics_of(tmp_path, "v2")
    assert [row["versions/drafter"] for row in rows] == [0, 0, 1]
    assert "prompts identical" in done.stdout and "DIFFERS" not in done.stdout
    served, expected = (
        fmean(row[f"rollout/{name}"] for row in rows) for name in ("acceptance_length", "expected_acceptance_length")
    )
    assert served > 1.3
    assert served == pytest.approx(expected, rel=0.03)
