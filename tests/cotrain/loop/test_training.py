"""The drafter's training beside other calls of its trainer, on the reactor that runs use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotrain.loop.reactor import Reactor
from cotrain.loop.training import Costs, DrafterTraining
from cotrain.process.calls import Reply
from cotrain.records import StepTotal
from cotrain.run.rows import RowFile, read_rows
from cotrain.trainer.trainer import DrafterTrainer
from tests.cotrain.loop.simulated_ray import Cluster, Reference


class Trainer:
    """Calls wait in a line; `work` makes the first of them."""

    def __init__(self) -> None:
        self.waiting: list[Reference] = []
        self.made: list[Any] = []

    def begin(self, method: Callable[..., Any], *args: Any) -> list[Reply[Any]]:
        self.waiting.append(Reference((method.__name__, *args)))
        return [Reply(self.waiting[-1])]

    def work(self, _: Any = None) -> None:
        if self.waiting:
            first = self.waiting.pop(0)
            self.made.append(first.what)
            first.result = ({"drafter/train_s": 0.5, "drafter/loss": float(len(self.made))}, 10.0, 10.5)


@pytest.fixture
def new(run_config: Any, tmp_path: Path) -> Any:
    def build(lag: int) -> Any:
        drafter = {"model": {"type": "eagle3"}, "updates_per_step": 4}
        config = run_config(steps=8, stream={"max_policy_lag": lag}, drafter=drafter)
        cluster, trainer = Cluster(), Trainer()
        cluster.happens = trainer.work
        reactor = Reactor(cluster, 5.0)  # type: ignore[arg-type]
        events = RowFile(tmp_path / f"stream{lag}.jsonl")
        return trainer, reactor, DrafterTraining(config, trainer, reactor, events), events  # type: ignore[arg-type]

    return build


def test_a_round_is_waited_for(new: Any) -> None:
    trainer, _, training, _ = new(lag=0)
    training.begin(3)
    training.finish()
    assert trainer.made == [("train", 3, 1)] * 4
    assert training.metrics() == {"drafter/train_s": 2.0, "drafter/loss": 2.5, "drafter/updates": 4}
    assert training.metrics() == {}


def test_other_calls_come_between_two_updates(new: Any) -> None:
    trainer, reactor, training, events = new(lag=1)
    training.begin(3)
    heads = trainer.begin(DrafterTrainer.set_target_weights)
    reactor.wait(heads)
    assert trainer.made == [("train", 3, 1), ("set_target_weights",)]
    training.begin(4)  # a round begins before the last one has ended
    training.finish()
    assert trainer.made[2:] == [("train", 3, 1)] + [("train", 4, 1)] * 3
    assert training.metrics() == {"drafter/train_s": 2.5, "drafter/loss": 3.8, "drafter/updates": 5}
    assert not training.left and not trainer.waiting
    assert [row["event"] for row in read_rows(events.path)] == ["drafter trained"] * 5


def test_a_round_costs_what_steps_and_learning_take_longer_beside_it() -> None:
    """Two engines generate at the same time. Batches without a step beside a round, or without one otherwise, tell nothing."""
    costs, most = Costs(), 100.0

    def step(trains: bool, engine_step_s: float, learn_s: float, batch: int = 4) -> None:
        totals = [StepTotal(3, 4, "steady", 50, 99, 50 * engine_step_s), StepTotal(3, batch, "mixed", 7, 9, most)]
        totals.append(StepTotal(3, 4, "prompts", 1, 9, 5.0 * trains))
        costs.step(trains, {0: totals, 1: totals}, {"learn": learn_s, "step": 20.0 + trains})

    step(False, 9.0, 90.0)  # the first step, in which processes warm up
    step(True, 0.05, 3.0)
    step(True, 0.05, 3.0, batch=5)
    spent = costs.spent(44.0)
    assert (spent.last, spent.round, spent.rounds, spent.elapsed) == (0.0, None, 2, 44.0)
    step(False, 0.04, 2.0, batch=6)
    spent, added = costs.spent(64.0), 50 * 0.01 + 1.0
    assert spent.round == pytest.approx(added) and spent.last == pytest.approx(2 * added), "also of the rounds before"
    assert 20 < spent.step < 21 and spent.rounds == 2
    assert costs.spent(64.0).last == 0.0
    step(True, 0.05, 3.0, batch=7)
    assert costs.spent(85.0).last == pytest.approx(added)
    for _ in range(60):
        step(True, 0.06, 4.0)
    assert costs.spent(0.0).round == pytest.approx(50 * 0.02 + 2.0, rel=0.02), "what was measured long ago is forgotten"
    for _ in range(60):
        step(True, 0.01, 1.0)
    assert costs.spent(0.0).round == 0.0
