"""Trains the drafter in the background. Other calls to the trainer run between two updates."""

from functools import partial

from cotrain.actors.drafter import Drafter
from cotrain.config.schema import RunConfig
from cotrain.loop.reactor import Reactor
from cotrain.run.rows import RowFile
from cotrain.trainer.trainer import DrafterTrainer


class DrafterTraining:
    """Keeps the drafter trainer busy. Each update is a call of its own, so that no other call waits for a whole round."""

    def __init__(self, config: RunConfig, trainer: Drafter, reactor: Reactor, events: RowFile):
        assert config.drafter is not None
        self._round = config.drafter.updates_per_step
        self._trainer, self._reactor, self._events = trainer, reactor, events
        self._step, self._left, self.under_way = 0, 0, False
        self._rows: list[dict[str, float]] = []

    def begin(self, step: int) -> None:
        """Start a round of drafter.updates_per_step updates. Updates that are left of an earlier round are dropped."""
        self._step, self._left = step, self._round
        if not self.under_way:
            self._go_on()

    def finish(self) -> None:
        """Wait for the end of the round."""
        self._reactor.until(lambda: not self.under_way)

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call, with their total time as drafter/train_s; empty if there were none."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        metrics = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        seconds = sum(row["drafter/train_s"] for row in rows)
        return metrics | {"drafter/train_s": seconds, "drafter/updates": len(rows)}

    def _go_on(self) -> None:
        self.under_way = True
        [reference] = self._trainer.begin(DrafterTrainer.train, self._step, 1).references
        self._reactor.add(reference, partial(self._trained, self._step))

    def _trained(self, step: int, returned: tuple[dict[str, float], float, float]) -> None:
        metrics, began, ended = returned
        self._rows.append(metrics)
        self._events.write(step, {"time": ended, "event": "drafter trained", "seconds": ended - began})
        self._left -= 1
        self.under_way = False
        if self._left > 0:
            self._go_on()
