"""What the learner tells the engines when it sends them the policy, without engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.actors.policy import EngineClient


class Engine:
    """An actor that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.call = SimpleNamespace(remote=lambda on, method, *args: self.calls.append((method.__name__, *args)))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_worker_of_every_engine_has_a_rank_of_its_own(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """A rank that two workers have makes the first transfer wait for ever. Rank 0 is the sender's."""
    monkeypatch.setattr("ray.get", lambda references: references)
    engines = [Engine(), Engine(), Engine()]
    EngineClient(engines, workers).init_weight_transfer_engine({"rank_offset": 1, "master_port": 7})
    ranks = [
        info["rank_offset"] + worker for engine in engines for _, info in engine.calls for worker in range(workers)
    ]
    assert ranks == list(range(1, 1 + 3 * workers))
    EngineClient(engines, workers).init_weight_transfer_engine({})  # CUDA IPC knows no ranks
    assert [engine.calls[-1] for engine in engines] == [("init_weight_transfer_engine", {})] * 3
