"""What commands on one engine share: the settings an engine is started with, and that it always stops."""

import argparse
import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.models.loading import resolve_model
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from pipelines.engines import DEFAULT_TASK, EngineSetup, add_engine_options, one_engine, prepare_engine


class IdleEngine:
    """Remembers how it was started."""

    def __init__(self, spec: Any) -> None:
        self.spec, self.running = spec, False

    async def start(self) -> None:
        self.running = True

    async def shutdown(self) -> None:
        self.running = False


@pytest.fixture
def setup(tmp_path: Path) -> EngineSetup:
    config = Eagle3Config(type="eagle3", draft_vocab_size=64, aux_layers=(2, 4, 5))
    drafter = build_drafter(config, TargetSpec.from_pretrained(resolve_model("tiny:llama")), seed=0)
    drafter.save(tmp_path / "v0", torch.float32)
    parser = argparse.ArgumentParser()
    add_engine_options(parser, "test", tokens=20)
    args = parser.parse_args(["--model", "tiny:llama", "--drafter", str(tmp_path / "v0"), "--dtype", "float32"])
    return prepare_engine(
        args, DEFAULT_TASK, 5, 16, tmp_path / "pulled", num_speculative_tokens=2, vllm={"block_size": 32}
    )


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A copy of the environment, which an engine's own variables go into."""
    own = dict(os.environ)
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr("pipelines.engines.RolloutEngine", IdleEngine)
    return own


def test_an_engine_has_room_for_every_prompt_and_keeps_the_runs_arguments(setup: EngineSetup) -> None:
    rollout, longest = setup.rollout, max(map(len, setup.prompts))
    assert len(setup.prompts) == 5
    assert (rollout.max_prompt_tokens, rollout.max_new_tokens) == (longest + 3, 20)
    assert rollout.vllm["block_size"] == 32 and rollout.vllm["max_num_seqs"] == 16
    assert rollout.vllm["max_num_batched_tokens"] >= 16 * rollout.positions("eagle3")


def test_an_engine_serves_the_drafter_and_stops_whatever_happens(
    setup: EngineSetup, environment: dict[str, str]
) -> None:
    engines: list[Any] = []

    async def fail() -> None:
        async with one_engine(setup, seed=3, num_threads=2) as engine:
            engines.append(engine)
            assert os.environ["TMPDIR"] == os.environ["VLLM_RPC_BASE_PATH"] == engine.spec.scratch
            assert engine.running and Path(engine.spec.scratch).is_dir()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        asyncio.run(fail())
    assert not engines[0].running and not Path(engines[0].spec.scratch).exists()
    assert engines[0].spec.drafter_folder == str(setup.drafter_folder)
    assert engines[0].spec.seed == 3
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "VLLM_RPC_BASE_PATH" not in os.environ and os.environ.get("TMPDIR") != engines[0].spec.scratch


def test_without_a_drafter_to_serve_none_is_named(setup: EngineSetup, environment: dict[str, str]) -> None:
    setup = replace(setup, drafter=None, drafter_folder=None)

    async def start() -> Any:
        async with one_engine(setup, seed=0, num_threads=1) as engine:
            return engine.spec

    spec = asyncio.run(start())
    assert spec.drafter_folder is None and spec.serving is None
