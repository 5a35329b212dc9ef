"""The drafter's training beside everything else. Other calls of the trainer come between two of its updates."""

from functools import partial

from cotrain.config.schema import RunConfig
from cotrain.roles.learners import Learner
from cotrain.run.rows import RowFile
from cotrain.stream.reactor import Reactor


class DrafterTraining:
    """Keeps the drafter trainer at work. Each update is a call, so that new heads and features never wait for a whole round."""

    def __init__(self, config: RunConfig, trainer: Learner, reactor: Reactor, events: RowFile):
        assert config.drafter is not None
        self._round = config.drafter.updates_per_step
        self._trainer, self._reactor, self._events = trainer, reactor, events
        self._left, self.under_way = 0, False
        self._rows: list[dict[str, float]] = []

    def begin(self, step: int) -> None:
        """Train for a round, in which the features of this step are new. What is left of an earlier round is not made up for."""
        self._left = self._round
        if not self.under_way:
            self._go_on(step)

    def finish(self) -> None:
        """Wait for the end of the round."""
        self._reactor.until(lambda: not self.under_way)

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call, and their seconds together; nothing where there were none."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        metrics = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        seconds = sum(row["drafter/train_s"] for row in rows)
        return metrics | {"drafter/train_s": seconds, "drafter/updates": len(rows)}

    def _go_on(self, step: int) -> None:
        self.under_way = True
        [reference] = self._trainer.begin("train", step, 1)
        self._reactor.add(reference, partial(self._trained, step))

    def _trained(self, step: int, returned: tuple[dict[str, float], float, float]) -> None:
        metrics, began, ended = returned
        self._rows.append(metrics)
        self._events.write(step, {"time": ended, "event": "drafter trained", "seconds": ended - began})
        self._left -= 1
        self.under_way = False
        if self._left > 0:
            self._go_on(step)
