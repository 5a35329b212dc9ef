"""A run on a policy with linear attention and experts that brings an MTP head, and its export in stock vLLM."""

from pathlib import Path

import pytest

from tests.engine.native_runs import Native, check_export, check_training, run_on

pytestmark = [pytest.mark.engine, pytest.mark.long]  # test_runs.py has a run


@pytest.fixture(scope="module")
def native(qwen3_next_folder: Path) -> Native:
    return Native(qwen3_next_folder, "Qwen3NextForCausalLM", "Qwen3NextMTP", "bfloat16")


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
