"""Runs on policies that bring an MTP head, dense, with experts or with linear attention, and their export in stock vLLM."""

from pathlib import Path

import pytest

from tests.engine.native_runs import Native, check_export, check_training, run_on
from tests.engine.runs import train
from tests.native_models import ARCHITECTURES, trained_native

pytestmark = [pytest.mark.engine, pytest.mark.long]  # test_runs.py has a run, test_mtp_head.py such a head

SERVED = {
    "mimo": ("MiMoForCausalLM", "float32"),
    "qwen3-next": ("Qwen3NextMTP", "bfloat16"),
    "qwen3-5": ("Qwen3_5MTP", "bfloat16"),
    "glm4-moe": ("Glm4MoeForCausalLM", "float32"),
}
"""Architecture of the head as a drafter of its own, and what vLLM's CPU build serves the policy in."""


@pytest.fixture(scope="module", params=SERVED)
def native(request: pytest.FixtureRequest) -> Native:
    return Native(trained_native(request.param), ARCHITECTURES[request.param][1], *SERVED[request.param])


@pytest.fixture(scope="module")
def finished(native: Native, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(run root, what the run printed)."""
    root = tmp_path_factory.mktemp("runs")
    return root, run_on(native, root)


def test_a_run_trains_publishes_and_registers_the_native_head(native: Native, finished: tuple[Path, str]) -> None:
    check_training(native, *finished)


def test_the_export_is_one_model_that_stock_vllm_speculates_with(
    native: Native, finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_export(native, finished[0], tmp_path / "exported", capsys)


def test_it_resumes(finished: tuple[Path, str]) -> None:
    root, _ = finished
    assert "Done: 4 of 4 steps" in train(root, "--resume", "smoke", "steps=4")
