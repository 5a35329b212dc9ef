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
        self._step = 0
        self.left = 0  # updates that are still to be made; one of them is under way
        self._rows: list[dict[str, float]] = []

    def begin(self, step: int) -> None:
        """Start a round of drafter.updates_per_step updates. Updates that are left of an earlier round are dropped."""
        is_idle = not self.left
        self._step, self.left = step, self._round
        if is_idle:
            self._go_on()

    def finish(self) -> None:
        """Wait for the end of the round."""
        self._reactor.until(lambda: not self.left)

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call, with their total time as drafter/train_s; empty if there were none."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        metrics = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        seconds = sum(row["drafter/train_s"] for row in rows)
        return metrics | {"drafter/train_s": seconds, "drafter/updates": len(rows)}

    def _go_on(self) -> None:
        [call] = self._trainer.begin(DrafterTrainer.train, self._step, 1)
        self._reactor.add(call.reference, partial(self._trained, self._step))

    def _trained(self, step: int, returned: tuple[dict[str, float], float, float]) -> None:
        metrics, began, ended = returned
        self._rows.append(metrics)
        self._events.write(step, {"time": ended, "event": "drafter trained", "seconds": ended - began})
        self.left -= 1
        if self.left:
            self._go_on()
